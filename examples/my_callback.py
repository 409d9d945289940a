"""A callback: rank 0 notes the losses and the checkpoints of a run in a file beside its metrics."""

import muster


@muster.register_callback("notes")
class Notes:
    def on_eval(self, now: muster.CallbackContext) -> None:
        self._write(now, f"validation loss {now.metrics['eval/loss']:.3f}")

    def on_save(self, now: muster.CallbackContext) -> None:
        self._write(now, f"saved {now.checkpoint}")

    def on_step(self, now: muster.CallbackContext) -> None:
        if (now.metrics["train/loss"] or 0.0) > 100:
            now.stop()

    def _write(self, now: muster.CallbackContext, text: str) -> None:
        if now.rank == 0:
            with (now.run_dir / "notes.txt").open("a") as file:
                file.write(f"step {now.step}: {text}\n")
