"""Readers of each file format: division of a file into spans for parallel work, and tokenization of a span."""

import codecs
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from muster.data.invalid_rows import InvalidRow, InvalidRowLog
from muster.data.json_files import array_rows, open_decompressed
from muster.data.megatron import read_indexed
from muster.data.plugin_rows import plugin_rows
from muster.data.rows import Row, RowReader
from muster.data.shard import DocumentWriter
from muster.data.sources import SourceFile, raise_unreadable
from muster.data.tokenizer import ByteTokenizer, Tokenizer, bos_before
from muster.spec.errors import ConfigError, MusterError

READ_BYTES = 1 << 20
"""Approximate amount of text that is tokenized in one call."""


@dataclass(frozen=True, slots=True)
class FileSpan:
    """Part `begin` … `end − 1` of a file.

    The unit depends on the format: bytes of text and JSON, row groups of Parquet, record batches of Arrow, documents of
    Megatron-LM. For a plugin's data set `end` is a limit in bytes of text, 0 for none.
    """

    file: SourceFile
    begin: int
    end: int
    size_bytes: int


@dataclass(frozen=True)
class Encoding:
    """Conversion of rows and texts to tokens; the same in every worker."""

    tokenizer: Tokenizer
    rows: RowReader
    dtype: np.dtype


Rows = Iterator[tuple[Row, int]]
"""Each row, and the approximate number of bytes that it takes in the file."""
Progress = Callable[[int], None]
"""Callback that receives the bytes read since its last call."""


def split_file(file: SourceFile, target_bytes: int) -> Iterator[FileSpan]:
    """Yield spans of about `target_bytes` that can be read independently. A text is one document: one span."""
    if file.file_format == "jsonl":
        for begin in range(0, file.size_bytes, target_bytes):
            end = min(begin + target_bytes, file.size_bytes)
            yield FileSpan(file, begin, end, end - begin)
    elif file.file_format == "megatron":
        documents = len(read_indexed(file.path).bounds) - 1
        yield from _even_spans(file, documents, target_bytes)
    elif file.file_format == "parquet":
        yield from _even_spans(file, _open_parquet(file.path).num_row_groups, target_bytes)
    elif file.file_format == "plugin":
        yield FileSpan(file, 0, 0, file.size_bytes)
    else:
        yield FileSpan(file, 0, file.size_bytes, file.size_bytes)


def _even_spans(file: SourceFile, units: int, target_bytes: int) -> Iterator[FileSpan]:
    parts = max(1, min(units, -(-file.size_bytes // target_bytes)))
    for part in range(parts):
        begin, end = (units * bound // parts for bound in (part, part + 1))
        yield FileSpan(file, begin, end, file.size_bytes // parts)


def tokenize_span(
    span: FileSpan, encoding: Encoding, invalid: InvalidRowLog, writer: DocumentWriter, progress: Progress
) -> None:
    """Add the documents of a span to a writer.

    Raises ConfigError if the file can't be read, or for an invalid row under the policy `stop`.
    """
    try:
        if span.file.file_format == "text":
            _write_text(span, encoding, invalid, writer, progress)
        elif span.file.file_format == "megatron":
            _write_indexed(span, encoding, invalid, writer)
            progress(span.size_bytes)
        else:
            _write_rows(_ROWS[span.file.file_format](span, encoding.rows, invalid), encoding, writer, progress)
    except OSError as error:
        if error.filename is None or Path(error.filename) != span.file.path:
            raise
        raise_unreadable(error)


# ----------------------------------------------------------------------------------------------------------------------
# Text


def _write_text(
    span: FileSpan, encoding: Encoding, invalid: InvalidRowLog, writer: DocumentWriter, progress: Progress
) -> None:
    """Add a text as one document; with the tokenizer `bytes` it may be larger than memory."""
    tokenizer = encoding.tokenizer
    position = writer.begin_document()
    try:
        if isinstance(tokenizer, ByteTokenizer):
            for chunk in _chunks(span):
                writer.extend(tokenizer.encode(chunk))
                progress(len(chunk))
        else:
            data = b"".join(_chunks(span))
            ids = tokenizer.encode(data)
            writer.extend(bos_before(ids, tokenizer))
            writer.extend(ids)
            progress(len(data))
        writer.extend([tokenizer.eos_id])
    except InvalidRow as row:
        writer.discard_document(position)
        invalid.record(str(span.file.path), row)


def _chunks(span: FileSpan) -> Iterator[bytes]:
    """Yield the bytes of a span of text. Raises InvalidRow at the first byte that is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with span.file.path.open("rb") as file:
        left = span.end
        line = 1
        while left and (chunk := file.read(min(READ_BYTES, left))):
            left -= len(chunk)
            if span.file.must_be_utf8:
                try:
                    decoder.decode(chunk, final=span.end == span.file.size_bytes and not left)
                except UnicodeDecodeError as error:
                    line += error.object[: error.start].count(b"\n")
                    message = f"line {line} is not UTF-8: it has the byte 0x{error.object[error.start]:02x}"
                    raise InvalidRow("encoding", message) from None
                line += chunk.count(b"\n")
            yield chunk


# ----------------------------------------------------------------------------------------------------------------------
# Rows


def _write_rows(rows: Rows, encoding: Encoding, writer: DocumentWriter, progress: Progress) -> None:
    """Add rows in groups that are large enough for a call of the tokenizer."""
    group: list[Row] = []
    num_characters = 0
    read_bytes = 0
    for row, size_bytes in rows:
        group.append(row)
        read_bytes += size_bytes
        num_characters += sum(len(text) for text, _ in row.segments)
        if num_characters >= READ_BYTES:
            writer.add_documents(*encode_rows(group, encoding))
            progress(read_bytes)
            group = []
            num_characters = 0
            read_bytes = 0
    if group:
        writer.add_documents(*encode_rows(group, encoding))
    progress(read_bytes)


def encode_rows(rows: list[Row], encoding: Encoding) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return (ids, lengths, loss mask) of documents.

    `ids` are those of all documents, each with its end-of-document token and, if the tokenizer has one, its
    begin-of-document token; `lengths` the tokens of each document; the mask is 1 for tokens that contribute to the
    loss, None if all do. Each segment of a row is tokenized separately, as a prompt is when a model answers it. The
    end-of-document token belongs to the last segment, the begin-of-document token to the first. For a dialogue the
    template decides: it gets no begin-of-document token, and no second one at its end.
    """
    tokenizer, segments = encoding.tokenizer, [segment for row in rows for segment in row.segments]
    flat, lengths = tokenizer.encode_batch([text for text, _ in segments])
    pieces = np.array([len(row.segments) for row in rows])
    last = np.cumsum(pieces) - 1
    first = last - pieces + 1
    is_dialogue = np.array([row.is_dialogue for row in rows])
    ended = np.cumsum(lengths)
    adds_bos = np.zeros(len(rows), bool)
    if tokenizer.bos_id is not None:
        adds_bos = ~is_dialogue & ~_are(flat, (ended - lengths)[first], lengths[first], tokenizer.bos_id)
    adds_eos = ~(is_dialogue & _are(flat, ended[last] - 1, lengths[last], tokenizer.eos_id))
    lengths = lengths.copy()
    lengths[first] += adds_bos
    lengths[last] += adds_eos
    stops = np.cumsum(lengths)[last]
    starts = np.append(0, stops[:-1])
    ids = np.empty(lengths.sum(), encoding.dtype)
    if len(flat) < 64 * len(rows):
        is_text = np.ones(len(ids), bool)
        is_text[stops[adds_eos] - 1] = is_text[starts[adds_bos]] = False
        ids[is_text] = flat
    else:
        taken = 0
        for begin, end in zip((starts + adds_bos).tolist(), (stops - adds_eos).tolist(), strict=True):
            ids[begin:end] = flat[taken : taken + end - begin]
            taken += end - begin
    ids[starts[adds_bos]] = tokenizer.bos_id or 0
    ids[stops[adds_eos] - 1] = tokenizer.eos_id
    loss_mask = None
    if not all(in_loss for _, in_loss in segments):
        loss_mask = np.repeat(np.array([in_loss for _, in_loss in segments], np.uint8), lengths)
    return ids, stops - starts, loss_mask


def _are(flat: np.ndarray, places: np.ndarray, lengths: np.ndarray, number: int) -> np.ndarray:
    """Return for each place in the ids True if it has this id; False where it belongs to a segment of length 0."""
    return (np.append(flat, 0)[places] == number) & (lengths > 0)


def _json_rows(span: FileSpan, reader: RowReader, invalid: InvalidRowLog) -> Rows:
    """Yield the rows of the lines that begin within the span."""
    with span.file.path.open("rb") as file:
        at = 0
        if span.begin:
            file.seek(span.begin - 1)
            at = span.begin - 1 + len(file.readline())
        begin, number = at, 0
        while at < span.end and (line := file.readline()):
            number += 1
            at += len(line)
            if line.isspace():
                continue
            try:
                row = reader.row(_parse_json(line))
            except InvalidRow as problem:
                invalid.record(f"{span.file.path}:{_count_lines(span.file.path, begin) + number}", problem)
                continue
            yield row, len(line)


def _compressed_json_rows(span: FileSpan, reader: RowReader, invalid: InvalidRowLog) -> Rows:
    """Yield the rows of a compressed file of JSON lines, which can only be read from its beginning."""
    with open_decompressed(span.file.path) as file:
        read_bytes = 0
        for number, line in enumerate(file, 1):
            if _is_cut(span) and read_bytes >= span.end:
                return
            read_bytes += len(line)
            if line.isspace():
                continue
            try:
                yield reader.row(_parse_json(line)), len(line)
            except InvalidRow as problem:
                invalid.record(f"{span.file.path}:{number}", problem)


def _json_array_rows(span: FileSpan, reader: RowReader, invalid: InvalidRowLog) -> Rows:
    """Yield the rows of a file that is one list of objects, maybe compressed."""
    read_bytes = 0
    for number, (item, size_bytes) in enumerate(array_rows(span.file.path), 1):
        if _is_cut(span) and read_bytes >= span.end:
            return
        read_bytes += size_bytes
        try:
            yield reader.row(item), size_bytes
        except InvalidRow as problem:
            invalid.record(f"{span.file.path}: row {number}", problem)


def _is_cut(span: FileSpan) -> bool:
    """Return True if a span that begins with its file ends before it, since data.max_bytes is reached."""
    return span.end < span.file.size_bytes


def _parse_json(line: bytes) -> Any:
    try:
        return json.loads(line.rstrip().decode())
    except UnicodeDecodeError as error:
        raise InvalidRow("encoding", f"not UTF-8: it has the byte 0x{line[error.start]:02x}") from None
    except json.JSONDecodeError as error:
        raise InvalidRow("json", f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}") from None
    except RecursionError:
        raise InvalidRow("json", "JSON that is nested too deeply to be read") from None


def _count_lines(path: Path, begin: int) -> int:
    count = 0
    with path.open("rb") as file:
        while begin and (chunk := file.read(min(READ_BYTES, begin))):
            count, begin = count + chunk.count(b"\n"), begin - len(chunk)
    return count


def _parquet_rows(span: FileSpan, reader: RowReader, invalid: InvalidRowLog) -> Rows:
    file = _open_parquet(span.file.path)
    number = sum(file.metadata.row_group(group).num_rows for group in range(span.begin))
    for group in range(span.begin, span.end):
        columns = [name for name in file.schema_arrow.names if name in reader.columns]
        for batch in file.iter_batches(row_groups=[group], columns=columns or None):
            yield from _table_rows(span.file.path, batch, number, reader, invalid)
            number += batch.num_rows


def _arrow_rows(span: FileSpan, reader: RowReader, invalid: InvalidRowLog) -> Rows:
    pyarrow = _import_pyarrow()
    from pyarrow import ipc

    number = 0
    try:
        with pyarrow.memory_map(str(span.file.path)) as data:
            try:
                batches: Any = ipc.open_stream(data)
            except pyarrow.ArrowInvalid:
                whole = ipc.open_file(data)
                batches = (whole.get_batch(index) for index in range(whole.num_record_batches))
            for batch in batches:
                columns = [name for name in batch.schema.names if name in reader.columns]
                chosen = batch.select(columns) if columns else batch
                yield from _table_rows(span.file.path, chosen, number, reader, invalid)
                number += batch.num_rows
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"{span.file.path} can't be read as an Arrow file: {error}") from error


def _table_rows(path: Path, batch: Any, number: int, reader: RowReader, invalid: InvalidRowLog) -> Rows:
    for index, row in enumerate(batch.to_pylist(), number + 1):
        try:
            yield reader.row(row), batch.nbytes // batch.num_rows
        except InvalidRow as invalid_row:
            invalid.record(f"{path}: row {index}", invalid_row)


def _plugin_rows(span: FileSpan, reader: RowReader, invalid: InvalidRowLog) -> Rows:
    return plugin_rows(span.file.name, span.file.path, reader, invalid, span.end)


_ROWS = {
    "jsonl": _json_rows,
    "compressed-jsonl": _compressed_json_rows,
    "json": _json_array_rows,
    "parquet": _parquet_rows,
    "arrow": _arrow_rows,
    "plugin": _plugin_rows,
}


def _open_parquet(path: Path) -> Any:
    pyarrow = _import_pyarrow()
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"{path} can't be read as a Parquet file: {error}") from error


def _import_pyarrow() -> Any:
    try:
        import pyarrow
    except ModuleNotFoundError:
        raise MusterError(
            "Parquet and Arrow files need pyarrow, which is not installed: pip install 'muster-llm[data]'"
        ) from None
    return pyarrow


# ----------------------------------------------------------------------------------------------------------------------
# Megatron


def _write_indexed(span: FileSpan, encoding: Encoding, invalid: InvalidRowLog, writer: DocumentWriter) -> None:
    """Add documents that are tokenized already; each gets the tokens that begin and end a document unless it has
    them."""
    tokenizer = encoding.tokenizer
    indexed = read_indexed(span.file.path)
    for document in range(span.begin, span.end):
        ids = indexed.tokens[indexed.bounds[document] : indexed.bounds[document + 1]]
        try:
            _require_ids(ids, tokenizer)
        except InvalidRow as row:
            invalid.record(f"{span.file.path.with_suffix('.bin')}: document {document + 1}", row)
            continue
        writer.begin_document()
        writer.extend(bos_before(ids, tokenizer))
        writer.extend(ids)
        if ids[-1] != tokenizer.eos_id:
            writer.extend([tokenizer.eos_id])


def _require_ids(ids: np.ndarray, tokenizer: Tokenizer) -> None:
    if not len(ids):
        raise InvalidRow("empty", "the document is empty")
    if ids.max() >= tokenizer.vocab_size or ids.min() < 0:
        at = int(np.flatnonzero((ids >= tokenizer.vocab_size) | (ids < 0))[0])
        raise InvalidRow(
            "vocabulary",
            f"token {at + 1} has the id {ids[at]}, but the tokenizer's ids are 0 … {tokenizer.vocab_size - 1}",
        )
