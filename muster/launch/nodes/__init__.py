"""Several nodes, each with a launcher of its own: how they find each other, agree, and hear of each other. Free of
torch."""
