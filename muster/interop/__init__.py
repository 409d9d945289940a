"""Other trainers' configurations as run files: what could be carried over, and what not and why."""
