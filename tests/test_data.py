"""The sample stream: a pure function of (seed, global sample index), whoever reads it."""

import hashlib
import re
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.config.load_config import load_run_config
from muster.data.dataset import IGNORE_INDEX, Batch, Dataset, StreamHash, sample_digest
from muster.data.prepare import PrepareOptions, prepare
from muster.data.sample_order import Windows, permute, random_key, sample_positions
from muster.data.store import TokenStore
from muster.data.tokenizer import ByteTokenizer
from muster.layout.mesh import coordinates_of
from muster.spec.errors import ConfigError, MusterError
from muster.spec.plan import Plan
from muster.train.batch_loader import BatchLoader
from muster.train.data import describe_missing_validation


@pytest.fixture(scope="module", name="store")
def _store(tmp_path_factory) -> TokenStore:
    """One document of 10,016 bytes of which no two windows are alike."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "a.txt").write_bytes(b"".join(hashlib.sha256(b"%d" % i).hexdigest()[:32].encode() for i in range(313)))
    return prepare(PrepareOptions(str(folder / "a.txt"), ByteTokenizer()), folder / "store")


# --- order ---

keys = st.integers(0, 2**64 - 1)


@given(st.integers(1, 3_000), keys)
def test_a_permutation_reaches_each_number_once(size, key):
    assert np.array_equal(np.sort(permute(np.arange(size), size, key)), np.arange(size))


@given(st.data(), st.integers(1, 2**50), keys)
def test_one_index_goes_where_the_array_sends_it(data, size, key):
    index = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=5))
    together = permute(np.array(index), size, key)
    assert together.tolist() == [permute(i, size, key) for i in index]
    assert len(set(together.tolist())) == len(set(index))


def test_permutations_differ_by_key_and_spread_evenly():
    """Over many keys each number lands on each place equally often, and the pair (0, 1) on each pair of places."""
    keys = [random_key("spread", i) for i in range(3_000)]
    landed = np.array([permute(np.arange(10), 10, key) for key in keys])
    counts = np.array([np.bincount(landed[:, i], minlength=10) for i in range(10)])
    assert np.abs(counts - 300).max() < 5 * 300**0.5
    pairs = np.bincount(landed[:, 0] * 10 + landed[:, 1], minlength=100).reshape(10, 10)
    assert pairs.diagonal().sum() == 0
    assert np.abs(pairs[~np.eye(10, dtype=bool)] - 3_000 / 90).max() < 5 * (3_000 / 90) ** 0.5


def test_the_order_is_the_one_that_checkpoints_rely_on():
    assert permute(np.arange(10), 10, 7).tolist() == [7, 4, 1, 3, 8, 0, 9, 6, 2, 5]
    assert permute(123_456_789, 10**12, random_key(3, "order", 1)) == 484353391817


@pytest.mark.parametrize("index", [-1, 10])
def test_an_index_outside_the_range_is_refused(index):
    with pytest.raises(ValueError, match="outside 0 … 9"):
        permute(index, 10, 0)


@given(st.integers(1, 50), st.integers(0, 200), st.integers(0, 300), st.integers(0, 2**63))
def test_each_epoch_has_each_sample_once(num_samples, first, count, seed):
    stream = sample_positions(0, first + count, num_samples, seed)
    assert np.array_equal(sample_positions(first, count, num_samples, seed), stream[first:])
    epochs = [stream[i : i + num_samples] for i in range(0, len(stream) - num_samples + 1, num_samples)]
    assert all(np.array_equal(np.sort(epoch), np.arange(num_samples)) for epoch in epochs)


def test_no_epoch_and_no_seed_has_the_order_of_another():
    orders = {tuple(sample_positions(40 * epoch, 40, 40, seed).tolist()) for epoch in range(5) for seed in range(5)}
    assert len(orders) == 25


@given(st.integers(3, 9_000), st.sampled_from([1, 7, 512, 20_000]), st.sampled_from([0, 0.01, 0.3, 0.5]), st.data())
@settings(max_examples=200)
def test_windows_predict_every_token_once_and_held_out_ones_are_apart(num_windows, seq_len, held_out, data):
    num_tokens = (num_windows - 1) * seq_len + data.draw(st.integers(1, seq_len)) + 1
    windows = Windows(num_tokens, seq_len, held_out)
    assert windows.num_windows == num_windows
    train = windows.train_windows(np.arange(windows.num_train))
    held = windows.validation_windows(np.arange(windows.num_validation))
    assert np.array_equal(np.sort(np.concatenate([train, held])), np.arange(windows.num_windows))
    assert np.all(np.diff(train) > 0)
    assert np.all(np.diff(held) > 0)
    assert windows.lengths(np.arange(windows.num_windows)).sum() == num_tokens - 1
    assert windows.lengths(np.arange(windows.num_windows)).min() > 0
    assert abs(len(held) - held_out * windows.num_windows) <= 1
    assert (len(held) > 0) == (held_out > 0)


def test_held_out_blocks_are_contiguous_and_spread():
    windows = Windows(num_tokens=30_000_001, seq_len=512, validation_split=0.01)
    held = windows.validation_windows(np.arange(windows.num_validation))
    starts = held[np.flatnonzero(np.diff(held, prepend=-9) > 1)]
    assert len(starts) == windows.num_validation * 512 // 16_384
    assert np.diff(starts).max() < 1.1 * windows.num_windows / len(starts)


@pytest.mark.parametrize(
    ("num_tokens", "held_out", "sentence"),
    [
        (100, 0.0, "has 100 tokens, but one window of train.seq_len 100 need 101; give more text"),
        (200, 0.01, "has 200 tokens, but one window for training and one for validation of train.seq_len 100 need 201"),
        (9_999, 0.7, "data.validation_split is a fraction from 0 to 0.5, got 0.7"),
    ],
)
def test_too_little_data_is_refused_with_numbers(num_tokens, held_out, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Windows(num_tokens, 100, held_out)
    Windows(num_tokens + 1, 100, min(held_out, 0.5))


# --- dataset ---


def test_labels_are_the_next_tokens_and_an_epoch_predicts_each_once(store):
    dataset = Dataset(store, seq_len=64, seed=1)
    batch = dataset.train_batch(0, dataset.num_train_samples)
    assert batch.tokens_BS.dtype == batch.labels_BS.dtype == np.int64
    assert batch.num_valid_tokens == (batch.labels_BS != IGNORE_INDEX).sum() == len(store.tokens) - 1
    counted = batch.labels_BS != IGNORE_INDEX
    pairs = np.stack([batch.tokens_BS[counted], batch.labels_BS[counted]])
    stream = np.stack([store.tokens[:-1], store.tokens[1:]])
    assert sorted(map(tuple, pairs.T.tolist())) == sorted(map(tuple, stream.T.tolist()))
    row = next(row for row, labels in enumerate(counted) if labels.all())
    assert np.array_equal(batch.tokens_BS[row, 1:], batch.labels_BS[row, :-1])


@given(st.integers(0, 500), st.integers(1, 4), st.integers(1, 8), st.integers(0, 3))
@settings(max_examples=25)
def test_ranks_together_read_the_global_batch(store, first, ranks, per_rank, seed):
    dataset = Dataset(store, seq_len=100, seed=seed)
    whole = dataset.train_batch(first, ranks * per_rank)
    parts = [dataset.train_batch(first + rank * per_rank, per_rank) for rank in range(ranks)]
    assert np.array_equal(np.concatenate([part.tokens_BS for part in parts]), whole.tokens_BS)
    assert np.array_equal(np.concatenate([part.labels_BS for part in parts]), whole.labels_BS)
    assert (
        sum(part.num_valid_tokens for part in parts)
        == whole.num_valid_tokens
        == (whole.labels_BS != IGNORE_INDEX).sum()
    )
    assert dataset.num_valid_tokens(first, ranks * per_rank) == whole.num_valid_tokens


@pytest.mark.parametrize("packing", ["concatenate", "next_fit", "none"])
def test_a_beginning_is_that_of_a_held_out_document(packing, tmp_path):
    for name in range(40):
        (tmp_path / f"{name:02}.txt").write_bytes(b"%02d: " % name + bytes(range(97, 97 + name % 20)))
    store = prepare(PrepareOptions(str(tmp_path), ByteTokenizer()), tmp_path / "store")
    dataset = Dataset(store, seq_len=20, validation_split=0.3, packing=packing)
    found = bytes(dataset.sample_prompt(8).tolist())
    assert re.fullmatch(rb"\d\d: abcd", found), "it has as many tokens as are wanted, where a document has them"
    held, trained = (
        [bytes(row[row < 256].tolist()) for row in batch.tokens_BS]
        for batch in (dataset.validation_batch(0, 99), dataset.train_batch(0, dataset.num_train_samples))
    )
    assert any(found in row for row in held)
    assert not any(found in row for row in trained)
    assert re.fullmatch(rb"\d\d: [a-s]+", bytes(dataset.sample_prompt(99).tolist())), "nothing of the next document"


def test_without_a_document_that_begins_a_beginning_is_that_of_a_sample(store):
    dataset = Dataset(store, seq_len=64, validation_split=0.1)
    assert dataset.sample_prompt(9).tolist() in dataset.validation_batch(0, 99).tokens_BS[:, :9].tolist()


def test_a_run_says_why_it_takes_no_validation_loss(store):
    dataset = Dataset(store, seq_len=64, validation_split=0.1)  # of 157 windows
    words = (
        "eval: no validation loss, since 16 validation samples don't fill a batch of 17: give data.validation_split"
        " more, or set eval.batches to 0"
    )
    for batch, batches, lines in ((16, 1, []), (17, 1, [words]), (17, 0, [])):
        changes = [("train.global_batch_size", batch), ("eval.batches", batches)]
        assert describe_missing_validation(load_run_config("tiny", None, changes).config, dataset) == lines
    for key in ("data.validation_split", "eval.batches"):
        config = load_run_config("tiny", None, [("eval.every", 5), (key, 0)]).config
        assert describe_missing_validation(config, dataset) == [
            f"eval: no validation loss every 5 steps, since {key} is 0"
        ]


def test_held_out_samples_are_the_same_for_every_seed_and_never_trained_on(store):
    one, two = (Dataset(store, seq_len=64, seed=seed, validation_split=0.1) for seed in (1, 2))
    count = one.num_validation_samples
    held = one.validation_batch(0, count)
    assert np.array_equal(held.tokens_BS, two.validation_batch(0, count).tokens_BS)
    trained = one.train_batch(0, one.num_train_samples)
    assert not np.array_equal(trained.tokens_BS, two.train_batch(0, two.num_train_samples).tokens_BS)
    assert not {row.tobytes() for row in held.labels_BS} & {row.tobytes() for row in trained.labels_BS}
    assert held.num_valid_tokens + trained.num_valid_tokens == len(store.tokens) - 1


def test_rows_after_the_last_held_out_sample_do_not_count(store):
    dataset = Dataset(store, seq_len=64, validation_split=0.1)
    count = dataset.num_validation_samples
    batch = dataset.validation_batch(count - 1, 3)
    assert batch.tokens_BS.shape == (3, 64)
    assert np.all(batch.labels_BS[1:] == IGNORE_INDEX)
    assert (
        batch.num_valid_tokens
        == (batch.labels_BS != IGNORE_INDEX).sum()
        == dataset.num_validation_valid_tokens(count - 1, 3)
        > 0
    )
    assert dataset.validation_batch(count + 5, 2).num_valid_tokens == 0
    assert Dataset(store, seq_len=64).validation_batch(0, 2).num_valid_tokens == 0


def test_the_stream_hash_knows_samples_and_order_but_not_steps(store):
    dataset = Dataset(store, seq_len=64, seed=5)

    def after(steps: list[tuple[int, int]], hash_: StreamHash) -> str:
        for first, count in steps:
            hash_.update(sample_digest(row) for row in dataset.train_batch(first, count).tokens_BS)
        return hash_.state

    whole = after([(0, 24)], StreamHash())
    stopped = after([(0, 8)], StreamHash())
    assert after([(8, 4), (12, 12)], StreamHash(stopped)) == whole
    others = [after(steps, StreamHash()) for steps in ([(1, 24)], [(12, 12), (0, 12)], [(0, 25)], [])]
    assert len({whole, stopped, *others}) == 6
    assert whole == "96617130181d74415e93748c0445b56852ea059b26c5d447a92dba5b51ddb574"


def test_an_id_beyond_the_vocabulary_ends_the_run_before_it_is_taken_for_zeros(tmp_path):
    """Vocabulary-parallel embeddings look an unknown id up on no rank, so that the batch itself is checked."""

    def rows(index, validation=False):
        tokens = np.full((len(index), 8), largest, np.int64)
        return Batch(tokens, tokens, tokens.size)

    data = SimpleNamespace(rows=rows, lengths=lambda *_: None, num_valid_tokens=lambda *_: 8)
    overrides = [("train.seq_len", 8), ("train.global_batch_size", 2), ("parallel", "tp2")]
    config = load_run_config("tiny", None, overrides).config
    stage = SimpleNamespace(is_first=True, is_last=True)
    world = SimpleNamespace(at=coordinates_of(Plan(tp=2), 1))
    loader = BatchLoader(config, config.parallel, world, data, {0: stage})
    largest = config.model.vocab_size - 1
    assert loader.read_batch(data, 0, 2).batch is not None
    largest += 1
    with pytest.raises(MusterError, match=f"token id {largest}, but the last of model.vocab_size {largest} is"):
        loader.read_batch(data, 0, 2)
