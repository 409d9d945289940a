"""One rank of one contestant of train_step.py: trains when the benchmark asks for steps, waits in between.

It reads numbers of steps from standard input, one a line, and answers each on standard output with a line of JSON:
the seconds that they took and the last step's loss. What libraries print goes to standard error.
"""

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.contestant_parts import (
    Pace,
    common_name,
    decayed_groups,
    is_decayed,
    read_batches,
    step_deepspeed,
)
from benchmarks.moe_contestants import deepspeed_moe, transformers_moe
from benchmarks.plain_llama import PlainLlama, draw, init_weights
from benchmarks.train_step import (
    BETAS,
    CLIP_NORM,
    LEARNING_RATE,
    SEQ_LEN,
    SIZES,
    SOURCE,
    SOURCE_BYTES,
    WEIGHT_DECAY,
    Size,
)
from muster.data.dataset import Dataset
from muster.data.prepare import PrepareOptions, open_or_prepare
from muster.data.store import TokenStore
from muster.data.tokenizer import ByteTokenizer


def plain(size: Size, dataset: Dataset, rank: int, world_size: int, pace: Pace) -> None:
    """A hand-written loop; with several ranks every block and the root are sharded by fully_shard (FSDP2)."""
    model = PlainLlama(size.model, SEQ_LEN)
    init_weights(model)
    if world_size > 1:
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo")
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(decayed_groups(model), lr=LEARNING_RATE, betas=BETAS, fused=True)
    batches = read_batches(dataset, rank, world_size, size.global_batch)
    wanted = pace.wait()
    while wanted:
        tokens_BS, labels_BS = next(batches)
        loss = model(tokens_BS, labels_BS)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        wanted = pace.step_done(loss.item())


def deepspeed_zero3(size: Size, dataset: Dataset, rank: int, world_size: int, pace: Pace) -> None:
    """DeepSpeed ZeRO stage 3 around the hand-written model."""
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    model = PlainLlama(size.model, SEQ_LEN)
    init_weights(model)
    optimizer = torch.optim.AdamW(decayed_groups(model), lr=LEARNING_RATE, betas=BETAS, fused=True)
    step_deepspeed(model, optimizer, {"stage": 3}, read_batches(dataset, rank, world_size, size.global_batch), pace)


def deepspeed_offload(size: Size, dataset: Dataset, rank: int, world_size: int, pace: Pace) -> None:
    """DeepSpeed's ZeRO-Offload (stage 2) with its CPUAdam around the hand-written model."""
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    deepspeed.init_distributed(dist_backend="gloo")
    model = PlainLlama(size.model, SEQ_LEN)
    init_weights(model)
    optimizer = DeepSpeedCPUAdam(decayed_groups(model), lr=LEARNING_RATE, betas=BETAS, adamw_mode=True)
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    step_deepspeed(model, optimizer, zero, read_batches(dataset, rank, world_size, size.global_batch), pace)


def hugging_face(size: Size, dataset: Dataset, rank: int, world_size: int, pace: Pace) -> None:
    """The Hugging Face Trainer with its own Llama; a callback gives it its turns."""
    import transformers

    spec = size.model
    config = transformers.LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.norm_eps,
        rope_theta=spec.rope_theta,
        max_position_embeddings=SEQ_LEN,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = transformers.LlamaForCausalLM(config)
    init_weights(model, common_name)

    class Samples(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return dataset.num_train_samples

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            batch = dataset.train_batch(index, 1)
            labels_S = torch.from_numpy(batch.labels_BS[0])
            # Labels that stand at their own position already go in as `shift_labels`, and are not shifted again.
            return {"input_ids": torch.from_numpy(batch.tokens_BS[0]), "labels": labels_S, "shift_labels": labels_S}

    class Turns(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):  # noqa: ANN001, ANN003
            control.should_training_stop = not pace.step_done(trainer.last_loss.item())

    class InOrder(transformers.Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            self.last_loss = super().training_step(*args, **kwargs)
            return self.last_loss

        def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
            return [name for name, _ in model.named_parameters() if is_decayed(common_name(name))]

        def _get_train_sampler(self, train_dataset: Any = None) -> torch.utils.data.Sampler:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    arguments = transformers.TrainingArguments(
        output_dir=os.environ["TMPDIR"],
        use_cpu=True,
        max_steps=10**6,
        per_device_train_batch_size=size.global_batch,
        optim="adamw_torch_fused",
        learning_rate=LEARNING_RATE,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=CLIP_NORM,
        lr_scheduler_type="constant",
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = InOrder(model=model, args=arguments, train_dataset=Samples(), callbacks=[Turns()])
    if pace.wait():
        trainer.train()


def muster(size: Size, dataset: Dataset, rank: int, world_size: int, pace: Pace, degrees: str = "dp{0}") -> None:
    """Muster's own trainer, with the plan `dpN` or another."""
    from muster.config.optim_config import OptimConfig
    from muster.config.run_config import DataConfig, RunConfig, TrainConfig
    from muster.parallel.world import open_world
    from muster.spec.plan_name import parse_plan_name
    from muster.train.trainer import Trainer

    optim = OptimConfig(
        lr=LEARNING_RATE,
        beta1=BETAS[0],
        beta2=BETAS[1],
        weight_decay=WEIGHT_DECAY,
        min_lr_ratio=1.0,
        clip_norm=CLIP_NORM,
    )
    train = TrainConfig(steps=10**6, seq_len=SEQ_LEN, global_batch_size=size.global_batch)
    config = RunConfig(model=size.model, data=DataConfig(source=SOURCE), train=train, optim=optim)
    plan = parse_plan_name(f"{degrees.format(world_size)}{size.words}-mb{size.global_batch // world_size}-fp32")
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, world_size, is_master=rank == 0)
    with open_world(store, rank, world_size, plan) as world:
        trainer = Trainer(config, plan, world, dataset)
        for stage in trainer.stages.values():
            for name, layout in stage.layouts.items():
                for box in layout.boxes:
                    stage.parameters[name].copy_(draw(name, layout.shape)[box.slices])
        wanted = pace.wait()
        while wanted:
            wanted = pace.step_done(trainer.step().loss)


CONTESTANTS: dict[str, Callable[[Size, Dataset, int, int, Pace], None]] = {
    "muster": muster,
    "muster-ep": partial(muster, degrees="dp{0}-ep{0}"),
    "plain": plain,
    "hugging-face": hugging_face,
    "deepspeed": deepspeed_zero3,
    "deepspeed-offload": deepspeed_offload,
    "transformers": transformers_moe,
    "deepspeed-moe": deepspeed_moe,
}


def main() -> None:
    """`python -m benchmarks.contestant NAME SIZE CACHE`, with the rank and the world in torchrun's variables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=CONTESTANTS)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("cache", type=Path, help="directory of the token store")
    args = parser.parse_args()
    # Libraries print to standard output: it becomes standard error, and the answers keep the real one.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    dataset = Dataset(open_store(args.cache), SEQ_LEN)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    CONTESTANTS[args.name](SIZES[args.size], dataset, rank, world_size, Pace(answers))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def open_store(cache: Path) -> TokenStore:
    """The tokens that everyone trains on: the first part of the Python standard library's sources."""
    return open_or_prepare(PrepareOptions(SOURCE, ByteTokenizer(), SOURCE_BYTES), cache)


if __name__ == "__main__":
    main()
