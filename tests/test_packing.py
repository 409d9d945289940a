"""Packed documents: each sees itself alone, wherever it lies; and mixtures of sources, whoever reads them."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.cli.main import main
from muster.data.blend import BLOCK_SAMPLES, BlendOrder, BlendWeights, block_quotas
from muster.data.blended_dataset import BlendedDataset
from muster.data.dataset import IGNORE_INDEX, Dataset, Packing, SampleStream, StreamHash, sample_digest
from muster.data.dp_slice import read_dp_slice
from muster.data.length_bucketing import bucket_by_length
from muster.data.prepare import PrepareOptions, prepare
from muster.data.store import TokenStore
from muster.data.tokenizer import ByteTokenizer
from muster.layout.mesh import coordinates_of
from muster.model.decoder import Decoder
from muster.model.documents import Documents
from muster.model.init import init_stage
from muster.model.recompute import apply_recompute
from muster.parallel.offload import ActivationOffload
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from tests import forks
from tests.train_runs import AT_ONCE, Command, rows_of, sample_hash, train

TOKENIZER = ByteTokenizer()
END = TOKENIZER.eos_id


def make_store(folder: Path, name: str, rows: list[dict]) -> TokenStore:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return prepare(PrepareOptions(str(folder / f"{name}.jsonl"), TOKENIZER), folder / name)


def texts(seed: int, count: int, longest: int = 40) -> list[str]:
    draw = np.random.default_rng(seed)
    return ["".join(map(chr, draw.integers(97, 123, draw.integers(1, longest)))) for _ in range(count)]


@pytest.fixture(scope="module", name="stores")
def _stores(tmp_path_factory) -> dict[str, TokenStore]:
    folder = tmp_path_factory.mktemp("stores")
    plain = [{"text": text} for text in texts(0, 150)]
    pairs = [{"prompt": a, "completion": b} for a, b in zip(texts(1, 80), texts(2, 80), strict=True)]
    long = [{"text": text} for text in [*texts(3, 5, 9), *texts(4, 12, 300), *texts(5, 5, 9)]]
    return {"plain": make_store(folder, "plain", plain), "pairs": make_store(folder, "pairs", pairs),
            "long": make_store(folder, "long", long)}  # fmt: skip


# --- packing ---


def valid_labels(store: TokenStore) -> list[tuple[int, int]]:
    """Every pair of a token and the next that is to be learnt, document by document."""
    counted = store.read_loss_mask(0, store.header.num_tokens)
    pairs = []
    ends = [*store.document_starts.tolist()[1:], store.header.num_tokens]
    for start, end in zip(store.document_starts.tolist(), ends, strict=True):
        for at in range(start + 1, end):
            if counted is None or counted[at]:
                pairs.append((int(store.tokens[at - 1]), int(store.tokens[at])))
    return pairs


@pytest.mark.parametrize("name", ["plain", "pairs", "long"])
@pytest.mark.parametrize("packing", ["document_mask", "next_fit", "none"])
@pytest.mark.parametrize("seq_len", [16, 64])
def test_an_epoch_learns_each_token_of_each_document_once(stores, name, packing: Packing, seq_len):
    store = stores[name]
    dataset = Dataset(store, seq_len, 3, packing=packing)
    batch = dataset.train_batch(0, dataset.num_train_samples)
    counted = batch.labels_BS != IGNORE_INDEX
    pairs = list(zip(batch.tokens_BS[counted].tolist(), batch.labels_BS[counted].tolist(), strict=True))
    assert sorted(pairs) == sorted(valid_labels(store))
    assert batch.num_valid_tokens == len(pairs) == dataset.num_valid_tokens(0, dataset.num_train_samples)
    parts = [dataset.num_valid_tokens(first, 3) for first in range(0, dataset.num_train_samples, 3)]
    assert sum(parts) >= len(pairs)  # the last three reach into the next epoch
    assert [dataset.train_batch(3 * i, 3).num_valid_tokens for i in range(len(parts))] == parts
    positions = batch.positions_BS
    if packing == "none":
        assert positions is None
        filled = dataset.lengths(np.arange(dataset.num_train_samples))
        assert filled is not None
        assert np.all(batch.labels_BS[np.arange(seq_len) >= filled[:, None]] == IGNORE_INDEX)
        assert not np.any((batch.tokens_BS == END)[:, :-1]), "an end is predicted, not read"
        return
    assert positions is not None
    ends = np.pad(batch.tokens_BS == END, ((0, 0), (1, 0)))[:, :-1]
    assert np.all(positions[ends] == 0)
    assert np.all(np.diff(positions, axis=1)[positions[:, 1:] != 0] == 1)
    assert np.all(positions[:, 0] == 0)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_whole_documents_are_cut_only_where_they_must(lengths, seq_len):
    from muster.data.packing import PackedDocuments

    lengths = [length + 1 for length in lengths]
    ends = np.cumsum(lengths)
    windows = PackedDocuments(int(ends[-1]), seq_len, 0.0, ends - lengths) if ends[-1] > seq_len else None
    if windows is None:
        return
    assert "_spans" in vars(windows), "they are laid out at once, since a first batch must not take long"
    all_windows = np.arange(windows.num_windows)
    starts, filled = windows.starts(all_windows), windows.lengths(all_windows)
    assert np.all((filled > 0) & (filled <= seq_len))
    predicted = sorted(
        token for start, size in zip(starts, filled, strict=True) for token in range(start + 1, start + size + 1)
    )
    firsts = set((ends - lengths).tolist())
    assert [token for token in predicted if token not in firsts] == [t for t in range(int(ends[-1])) if t not in firsts]
    assert len(set(predicted)) == len(predicted)
    for start in starts.tolist():
        if start not in firsts:  # cut: its document is longer than a sample
            document = int(np.searchsorted(ends, start, side="right"))
            assert lengths[document] > seq_len + 1


PLANS_OF_12 = ["dp1-mb1", "dp1-mb3", "dp2-mb2", "dp3-mb4", "dp2-mb1-z1-uneven2.1", "dp2-pp2-mb2", "tp2-sp-pp2-mb4"]

SPECS = {
    "rope": ModelSpec(vocab_size=257, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=24),
    "learned": ModelSpec(vocab_size=257, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=2,
                         intermediate_size=24, position="learned", max_positions=64, norm="layer"),
    "window": ModelSpec(vocab_size=257, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=2, intermediate_size=24,
                        sliding_window=5),
    "softcap": ModelSpec(vocab_size=257, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2,
                         intermediate_size=24, sliding_window=5, window_layers=(0,), attention_softcap=0.5),
}  # fmt: skip


def make_model(name: str) -> Decoder:
    spec = SPECS[name]
    model = Decoder(spec, range(spec.num_layers), first=True, last=True)
    init_stage(model, spec, 1)
    return model.double()


def token_losses(
    model: Decoder, tokens_BS: np.ndarray, labels_BS: np.ndarray, positions: np.ndarray | None
) -> torch.Tensor:
    device = torch.device("cpu")
    model.position_state.documents = (
        None if positions is None else Documents.from_positions(torch.from_numpy(positions), device)
    )
    logits = model(torch.from_numpy(tokens_BS))
    return F.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(labels_BS).flatten(), reduction="none", ignore_index=IGNORE_INDEX
    )


@pytest.mark.parametrize("recompute", ["none", "elementwise", "full"])
@pytest.mark.parametrize("kind", SPECS)
def test_packed_documents_have_the_losses_and_gradients_that_they_have_alone(stores, kind, recompute):
    store, model = stores["plain"], make_model(kind)
    for layer in model.blocks():
        apply_recompute(layer, recompute)
    dataset = Dataset(store, 64, 5, packing="next_fit")
    batch = dataset.train_batch(0, 4)
    assert batch.positions_BS is not None
    packed = token_losses(model, batch.tokens_BS, batch.labels_BS, batch.positions_BS)
    packed.sum().backward()
    gradients = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    model.zero_grad()
    alone = []
    for row in range(4):
        begins = [*np.flatnonzero(batch.positions_BS[row] == 0).tolist(), 64]
        for begin, end in zip(begins[:-1], begins[1:], strict=True):
            tokens, labels = (a[row : row + 1, begin:end] for a in (batch.tokens_BS, batch.labels_BS))
            alone.append(token_losses(model, tokens, labels, None))
            alone[-1].sum().backward()
    assert len(alone) > 8
    torch.testing.assert_close(packed, torch.cat(alone), rtol=0, atol=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-11)
    # The bug that this would find: documents that see those before them.
    seen = token_losses(model, batch.tokens_BS, batch.labels_BS, None)
    assert (seen - packed).abs().max() > 1e-6


@pytest.mark.parametrize("kind", SPECS)
def test_what_packed_documents_keep_goes_to_the_host_and_comes_back(stores, kind):
    gradients = []
    for offload in (None, ActivationOffload(torch.device("cpu"))):
        model = make_model(kind)
        for layer in model.blocks():
            if offload is not None:
                offload.track_layer(layer)
        batch = Dataset(stores["plain"], 64, 5, packing="next_fit").train_batch(0, 4)
        losses = token_losses(model, batch.tokens_BS, batch.labels_BS, batch.positions_BS)
        if offload is not None:
            offload.end_forward(0, losses)
            offload.offload(0)()
            assert offload.link.copied_bytes > 0
            documents = model.position_state.documents
            assert documents is not None
            assert documents.positions_BS.tolist() == batch.positions_BS.tolist()
            offload.reload(0)()
        losses.sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


@pytest.mark.parametrize("kind", SPECS)
def test_padded_documents_have_the_losses_that_they_have_alone(stores, kind):
    model, dataset = make_model(kind), Dataset(stores["plain"], 64, 5, packing="none")
    lengths, batch = dataset.lengths(np.arange(6)), dataset.train_batch(0, 6)
    assert lengths is not None
    longest = int(lengths.max())
    padded = token_losses(model, batch.tokens_BS[:, :longest], batch.labels_BS[:, :longest], None)
    alone = []
    for row, length in enumerate(lengths.tolist()):
        own = token_losses(
            model, batch.tokens_BS[row : row + 1, :length], batch.labels_BS[row : row + 1, :length], None
        )
        alone.append(F.pad(own, (0, longest - length)))
    torch.testing.assert_close(padded, torch.cat(alone), rtol=0, atol=1e-12)
    # The bug that this would find: padding that is learnt.
    learnt_BS = np.where(batch.labels_BS == IGNORE_INDEX, 0, batch.labels_BS)[:, :longest]
    seen = token_losses(model, batch.tokens_BS[:, :longest], learnt_BS, None)
    assert (seen - padded).abs().max() > 1e-6


@given(st.lists(st.integers(1, 48), min_size=12, max_size=12), st.sampled_from(PLANS_OF_12))
@settings(max_examples=40, deadline=None)
def test_micro_batches_by_length(lengths, name):
    plan, lengths_B = parse_plan_name(name), np.array(lengths)
    found = bucket_by_length(lengths_B, plan, 4, seq_len=48)
    assert sorted(found.samples_B.tolist()) == list(range(12))
    by_micro_batch: list[list[int]] = [[] for _ in found.lengths_M]
    for rank in range(plan.mesh(0).dp_size):
        for place, at in enumerate(plan.sample_range(rank, 12)):
            by_micro_batch[place // plan.micro_batch_size].append(int(lengths_B[found.samples_B[at]]))
    for own, padded in zip(by_micro_batch, found.lengths_M, strict=True):
        assert max(own) <= padded <= min(48, max(own) + 7)
        assert padded % 8 == 0
    assert all(min(one) >= max(next_) for one, next_ in pairwise(by_micro_batch)), "the longest come first"


# --- mixtures ---


def test_a_block_has_each_source_in_its_proportion():
    assert block_quotas([0.7, 0.3]).tolist() == [700, 300]
    assert block_quotas([1, 1, 1]).tolist() == [334, 333, 333]
    assert block_quotas([1, 0, 1e-9]).tolist() == [999, 0, 1]
    with pytest.raises(ValueError, match="not all of them 0"):
        block_quotas([0, 0])


@given(st.integers(0, 2_500), st.integers(1, 2_500), st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_each_source_is_gone_through_without_a_gap_over_all_stages(first, count, seed):
    order = BlendOrder([BlendWeights(0, (3, 1)), BlendWeights(1_234, (0, 1)), BlendWeights(1_300, (1, 1))], seed)
    source, index = order.locate(0, first + count)
    for one in (0, 1):
        assert sorted(index[source == one].tolist()) == list(range(int((source == one).sum())))
    assert order.samples_per_source(first + count).tolist() == np.bincount(source, minlength=2).tolist()
    again = order.locate(first, count)
    assert np.array_equal(again[0], source[first:])
    assert np.array_equal(again[1], index[first:])
    assert set(source[1_234:1_300].tolist()) <= {1}
    if first + count >= BLOCK_SAMPLES:
        assert (source[:BLOCK_SAMPLES] == 0).sum() == 750


def stream(dataset: SampleStream, plans: list[tuple[str, int, int]]) -> str:
    """Return the hash of the samples that ranks read under several plans, each resuming from the one before."""
    hash_, at = StreamHash(), 0
    for name, batch_size, num_steps in plans:
        plan: Plan = parse_plan_name(name)
        for _ in range(num_steps):
            places = [coordinates_of(plan, rank) for rank in range(plan.world_size)]
            for place in places:
                share = read_dp_slice(dataset.train_batch, plan, place, at, batch_size)
                assert (share.positions_BS is None) == (dataset.train_batch(0, 1).positions_BS is None)
                hash_.update(sample_digest(row) for row in share.tokens_BS)
            at += batch_size
    return hash_.state


@pytest.mark.parametrize("packing", ["concatenate", "document_mask", "next_fit"])
def test_the_stream_of_a_mixture_is_the_same_for_any_ranks_and_batches(stores, packing: Packing):
    sources = {name: Dataset(store, 32, seed, 0.1, packing) for seed, (name, store) in enumerate(stores.items())}
    dataset = BlendedDataset(sources, [BlendWeights(0, (2, 1, 1)), BlendWeights(50, (1, 1, 0))], 7)
    assert dataset.num_train_samples < 320  # so that there is more than an epoch
    whole = stream(dataset, [("dp1-mb16", 16, 20)])
    assert stream(dataset, [("dp4-mb2", 8, 10), ("dp2-mb4", 16, 5), ("dp8-mb1", 32, 5)]) == whole
    assert stream(dataset, [("dp4-mb2", 8, 10), ("dp2-mb4", 16, 5), ("dp8-mb1", 32, 4)]) != whole
    batch = dataset.train_batch(3, 9)
    assert batch.num_valid_tokens == dataset.num_valid_tokens(3, 9) == (batch.labels_BS != IGNORE_INDEX).sum()


def test_held_out_samples_of_a_mixture_are_those_of_its_sources(stores):
    sources = {name: Dataset(store, 32, seed, 0.1) for seed, (name, store) in enumerate(stores.items())}
    dataset = BlendedDataset(sources, [BlendWeights(0, (1, 1, 1))], 7)
    count = dataset.num_validation_samples
    mixed = dataset.validation_batch(0, count + 3)
    own = [one.validation_batch(0, one.num_validation_samples) for one in sources.values()]
    assert count == sum(len(batch.tokens_BS) for batch in own)
    assert sorted(map(bytes, mixed.tokens_BS[:count])) == sorted(bytes(row) for batch in own for row in batch.tokens_BS)
    assert np.all(mixed.labels_BS[count:] == IGNORE_INDEX)
    trained = dataset.train_batch(0, 400)
    assert not set(map(bytes, mixed.labels_BS[:count])) & set(map(bytes, trained.labels_BS))


# --- runs ---


def run_file(
    folder: Path,
    stores: dict[str, TokenStore],
    eval: dict | None = None,
    packing: str = "document_mask",
    **train: object,
) -> Path:
    """Write a run file with a blend whose weights change after 16 samples."""
    mix = [{"name": name, "source": str(store.directory), "weight": 1} for name, store in stores.items()]
    changes = [{"from_sample": 16, "weights": {"pairs": 1, "long": 1}}]
    data = {"blend": mix, "packing": packing, "weight_schedule": changes, "validation_split": 0.2, "hash_samples": True}
    train = {"seq_len": 64, "global_batch_size": 8, "steps": 3, "sample_tokens": 0, **train}
    (folder / "run.yaml").write_text(
        json.dumps({"extends": "tiny", "model": {"num_layers": 2}, "data": data, "train": train, "eval": eval or {}})
    )
    return folder / "run.yaml"


def test_a_packed_mixture_trains_alike_under_every_plan(stores, tmp_path):
    plans = ["tp2-sp-pp2-rfull-mb2"]
    done = forks.run("verify", run_file(tmp_path, stores), "--against", *plans, "--steps", "1")
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_source_is_validated_and_eval_says_the_same(stores, tmp_path, capsys):
    file, run = run_file(tmp_path, stores, eval={"every": 2, "batches": 1}, global_batch_size=4), tmp_path / "run"
    ended = train(file, "--run", run, "--parallel", "dp1-mb4")
    assert ended.code == 0, ended.err
    assert "waiting for data: " in ended.out
    row = next(row for row in rows_of(run) if row["step"] == 2)
    assert [key for key in row if key.endswith("loss") and "eval" in key] == [
        "eval/loss", "eval/plain/loss", "eval/pairs/loss", "eval/long/loss"]  # fmt: skip
    assert row["eval/perplexity"] == pytest.approx(np.exp(row["eval/loss"]))
    assert "eval/loss" not in rows_of(run)[-1]
    capsys.readouterr()
    assert main(["eval", str(run), "--samples", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["sources"]
    last = ended.out[ended.out.rindex("validation loss") :]
    assert f"validation loss {found['all']['loss']:.4f} (plain {found['plain']['loss']:.4f}, " in last
    assert main(["eval", str(run), "--source", str(stores["long"].directory), "--samples", "3"]) == 0
    assert capsys.readouterr().out.startswith("all          loss ")


@pytest.mark.soak
@pytest.mark.parametrize("packing", ["document_mask", "none"])
def test_a_run_killed_again_and_again_reads_the_same_stream_on_other_ranks_and_with_other_batches(
    stores, tmp_path, packing
):
    file = run_file(tmp_path, stores, steps=24, save_every=2, eval={"batches": 0}, packing=packing)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert train(file, "--run", whole, *AT_ONCE).code == 0
    stopped = train(file, "--run", broken, "--train.max_minutes", "0.0001", *AT_ONCE)
    assert (stopped.code, [row["step"] for row in rows_of(broken)]) == (75, [1]), stopped.err
    for parallel, step in (("dp4-mb2", 5), ("dp2-mb4", 11)):
        with Command(file, "--run", broken, "--parallel", parallel, *AT_ONCE) as command:
            command.wait_for_step(step)
            command.kill()
    manifest = sorted((broken / "checkpoints").glob("step-*/manifest.json"))[-1]
    done = json.loads(manifest.read_text())["counters"]["samples_consumed"]
    steps = int(manifest.parent.name.removeprefix("step-"))
    more = ("--train.global_batch_size", "16", "--train.steps", str(steps + (24 * 8 - done) // 16), "--allow-changes")
    ended = train(file, "--run", broken, "--parallel", "dp8-mb2", *more, *AT_ONCE)
    assert ended.code == 0, ended.err
    assert sample_hash(broken) == sample_hash(whole)


def test_samples_of_unequal_lengths_are_refused_with_compile(capsys):
    arguments = ["train", "--preset", "tiny", "--data.packing", "none", "--parallel.compile", "true", "--dry-run"]
    assert main(arguments) == 3
    assert "data.packing none can't be run with compile" in capsys.readouterr().err
