"""Bad input: the right error, one sentence that names the argument, and nothing written."""

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import cute_ssd
from cute_ssd import DtypeError, ShapeError, UnsupportedError

from .common import extras, inputs, packed


def scan(**changes: Any) -> None:
    made = inputs(2, 20)
    more = extras(made)
    cute_ssd.mamba_chunk_scan_combined(**{**made, "chunk_size": 64, **more, **changes})


def one_row(**changes: Any) -> None:
    cute_ssd.mamba_chunk_scan_combined(**{**inputs(1, 20), "chunk_size": 64, **changes})


def ssd(**changes: Any) -> None:
    made = inputs(2, 20)
    cute_ssd.ssd_chunk_scan(
        **{"x": made["x"], "log_decay": -torch.rand(2, 4, 20), "B": made["B"], "C": made["C"], **changes}
    )


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


BAD: list[tuple[Callable[..., None], dict[str, Any], type[Exception], str]] = [
    # ranks and sizes name the axis
    (scan, {"x": torch.zeros(20, 4, 8)}, ShapeError, "x has 3 dimensions"),
    (scan, {"dt": torch.zeros(2, 20)}, ShapeError, "dt has 2 dimensions"),
    (scan, {"dt": torch.zeros(2, 20, 5)}, ShapeError, r"dt has nheads \(axis 2\) 5, expected 4"),
    (scan, {"A": torch.zeros(4, 1)}, ShapeError, "A has 2 dimensions"),
    (scan, {"A": torch.zeros(5)}, ShapeError, r"A has nheads \(axis 0\) 5"),
    (scan, {"B": torch.zeros(2, 21, 2, 16)}, ShapeError, r"B has seqlen \(axis 1\) 21"),
    (scan, {"C": torch.zeros(2, 20, 2, 17)}, ShapeError, r"C has dstate \(axis 3\) 17"),
    (scan, {"C": torch.zeros(2, 20, 1, 16)}, ShapeError, r"C has ngroups \(axis 2\) 1"),
    (scan, {"D": torch.zeros(4, 9)}, ShapeError, r"D has headdim \(axis 1\) 9"),
    (scan, {"D": torch.zeros(3)}, ShapeError, r"D has nheads \(axis 0\) 3"),
    (
        scan,
        {"D": torch.tensor(1.0)},
        ShapeError,
        r"D has 0 dimensions \(\), expected 1 \(nheads=4\) or 2 \(nheads=4, headdim=8\)",
    ),
    (scan, {"z": torch.zeros(2, 20, 4, 9)}, ShapeError, "z has shape"),
    (scan, {"dt_bias": torch.zeros(3)}, ShapeError, "dt_bias has nheads"),
    (scan, {"initial_states": torch.zeros(1, 4, 8, 16)}, ShapeError, r"initial_states has batch \(axis 0\) 1"),
    (scan, {"initial_states": torch.zeros(2, 4, 16, 8)}, ShapeError, "initial_states has headdim"),
    (scan, {"seq_idx": torch.zeros(2, 19, dtype=torch.int32)}, ShapeError, "seq_idx has seqlen"),
    (scan, {"B": torch.zeros(2, 20, 3, 16), "C": torch.zeros(2, 20, 3, 16)}, ShapeError, "divisor of nheads 4"),
    (ssd, {"log_decay": -torch.rand(2, 20, 4)}, ShapeError, r"log_decay has nheads \(axis 1\) 20, expected 4"),
    # empty heads, groups and states
    (scan, {"x": torch.zeros(2, 20, 0, 8)}, ShapeError, r"x has nheads \(axis 2\) 0"),
    (scan, {"x": torch.zeros(2, 20, 4, 0)}, ShapeError, "headdim"),
    (scan, {"B": torch.zeros(2, 20, 0, 16)}, ShapeError, "ngroups"),
    (scan, {"B": torch.zeros(2, 20, 2, 0)}, ShapeError, "dstate"),
    # values
    (scan, {"chunk_size": 0}, ShapeError, "chunk_size is 0"),
    (scan, {"chunk_size": -64}, ShapeError, "chunk_size is -64"),
    (scan, {"dt_limit": (1.0, 0.5)}, ShapeError, "dt_limit"),
    (scan, {"dt_limit": (float("nan"), 0.5)}, ShapeError, "dt_limit"),
    (scan, {"dt_limit": (0.0, 1.0, 2.0)}, ShapeError, "expected two numbers"),
    (scan, {"dt_limit": None}, ShapeError, "dt_limit is None"),
    (scan, {"dt_limit": (None, 1.0)}, DtypeError, "dt_limit has None"),
    # types
    (scan, {"x": [1.0]}, DtypeError, "x is a list, expected a torch tensor"),
    (scan, {"dt": None}, DtypeError, "dt is None"),
    (scan, {"A": None}, DtypeError, "A is None"),
    (scan, {"D": 1.0}, DtypeError, "D is a float, expected a torch tensor or None"),
    (ssd, {"log_decay": None}, DtypeError, "log_decay is None"),
    (scan, {"chunk_size": 1.5}, DtypeError, "chunk_size is a float, expected an integer"),
    (scan, {"chunk_size": None}, DtypeError, "chunk_size is None"),
    (scan, {"chunk_size": numpy.float32(64)}, DtypeError, "chunk_size is a float32, expected an integer"),
    (scan, {"chunk_size": numpy.bool_(True)}, DtypeError, "chunk_size is a bool"),
    (scan, {"chunk_size": numpy.int64(0)}, ShapeError, "chunk_size is 0"),
    (scan, {"dt_limit": (numpy.complex64(0), 1.0)}, DtypeError, "dt_limit has a complex64"),
    (scan, {"chunk_size": 2**70}, ShapeError, "64 bits"),
    (scan, {"state_dtype": "float32"}, DtypeError, "state_dtype is a str"),
    # dtypes
    (scan, {"x": torch.zeros(2, 20, 4, 8, dtype=torch.int32)}, DtypeError, "x is int32"),
    (scan, {"x": torch.zeros(2, 20, 4, 8, dtype=torch.complex64)}, DtypeError, "x is complex64"),
    (scan, {"x": torch.zeros(2, 20, 4, 8).bfloat16()}, DtypeError, "B is float32, expected bfloat16"),
    (scan, {"z": torch.zeros(2, 20, 4, 8).half()}, DtypeError, "z is float16"),
    (scan, {"dt": torch.zeros(2, 20, 4, dtype=torch.int64)}, DtypeError, "dt is int64"),
    (scan, {"A": torch.zeros(4, dtype=torch.bool)}, DtypeError, "A is bool"),
    (scan, {"seq_idx": torch.zeros(2, 20)}, DtypeError, "seq_idx is float32"),
    (scan, {"state_dtype": torch.int32}, DtypeError, "state_dtype is int32"),
    # layouts
    (scan, {"x": torch.zeros(2, 20, 4, 8).to_sparse()}, ShapeError, r"x has layout torch.sparse_coo.*x\.to_dense\(\)"),
    (scan, {"B": torch.zeros(2, 20, 2, 16).to_sparse()}, ShapeError, "B has layout torch.sparse_coo"),
    (ssd, {"log_decay": torch.zeros(2, 4, 20).to_sparse()}, ShapeError, "log_decay has layout torch.sparse_coo"),
    # devices
    (scan, {"A": torch.zeros(4, device="meta")}, ShapeError, "A is on meta, expected cpu"),
    (scan, {"B": torch.zeros(2, 20, 2, 16, device="meta")}, ShapeError, "B is on meta, expected cpu"),
    (scan, {"D": torch.zeros(4, device="meta")}, ShapeError, "D is on meta, expected cpu"),
    (scan, {"x": torch.zeros(2, 20, 4, 8, device="meta")}, ShapeError, "B is on cpu, expected meta"),
    (scan, {"initial_states": torch.zeros(2, 4, 8, 16, device="meta")}, ShapeError, "initial_states is on meta"),
    (one_row, {"cu_seqlens": ints(0, 20).to("meta")}, ShapeError, "cu_seqlens is on meta"),
    # offsets and ids
    (scan, {"cu_seqlens": ints(0, 20)}, ShapeError, r"batch \(axis 0\) 2, expected 1"),
    (one_row, {"return_varlen_states": True}, ShapeError, "cu_seqlens is None"),
    (one_row, {"cu_seqlens": torch.zeros(0, dtype=torch.int32)}, ShapeError, "cu_seqlens is empty"),
    (one_row, {"cu_seqlens": torch.zeros(2)}, DtypeError, "cu_seqlens is float32"),
    (one_row, {"cu_seqlens": ints(1, 20)}, ShapeError, "starts at 1"),
    (one_row, {"cu_seqlens": ints(0, 12, 8, 20)}, ShapeError, "falls from 12 to 8"),
    (one_row, {"cu_seqlens": ints(0, 21)}, ShapeError, "ends at 21, expected at most 20"),
    (
        one_row,
        {"cu_seqlens": ints(0, 10, 20), "seq_idx": torch.zeros(1, 20, dtype=torch.int32)},
        ShapeError,
        "disagree at token 10",
    ),
    (one_row, {"cu_seqlens": ints(0, 20), "seq_idx": torch.arange(20)[None].int()}, ShapeError, "disagree at token 1"),
]


@pytest.mark.parametrize("call, changes, error, message", BAD)
def test_scan(call: Callable[..., None], changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        call(**changes)
    one_sentence(caught.value)


def one_sentence(error: BaseException) -> None:
    text = str(error)
    assert text.endswith(".") and "\n" not in text and ". " not in text.replace("e.g. ", ""), text


def prefill(device: str = "cpu", **changes: Any) -> tuple[dict[str, Any], Tensor, Tensor]:
    made = packed(inputs(1, 20, device=device))
    pool, out = torch.randn(4, 4, 8, 16, device=device), torch.full((20, 4, 8), 5.0, device=device)
    arguments = {
        **made,
        "ssm_pool": pool,
        "cache_indices": ints(3, 0).to(device),
        "query_start_loc": ints(0, 8, 20).to(device),
        "has_initial_state": torch.tensor([True, False], device=device),
        "out": out,
        **changes,
    }
    return arguments, pool, out


BAD_PREFILL: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"cache_indices": ints(4, 0)}, ShapeError, r"cache_indices\[0\] is 4, expected a slot from 0 to 3"),
    ({"cache_indices": ints(0, -2)}, ShapeError, r"cache_indices\[1\] is -2"),
    ({"cache_indices": ints(2, 2)}, ShapeError, r"cache_indices\[1\] is 2, already named at 0"),
    ({"cache_indices": ints(2)}, ShapeError, "cache_indices has num_seqs"),
    ({"cache_indices": torch.tensor([2.0, 1.0])}, DtypeError, "cache_indices is float32"),
    ({"query_start_loc": ints(0, 9, 8)}, ShapeError, "query_start_loc falls from 9 to 8"),
    ({"query_start_loc": ints(0, 9, 21)}, ShapeError, "query_start_loc ends at 21"),
    ({"query_start_loc": ints(2, 9, 20)}, ShapeError, "query_start_loc starts at 2"),
    ({"has_initial_state": torch.ones(2)}, DtypeError, "has_initial_state is float32"),
    ({"has_initial_state": torch.ones(3, dtype=torch.bool)}, ShapeError, "has_initial_state has num_seqs"),
    ({"ssm_pool": torch.zeros(4, 4, 8, 15)}, ShapeError, r"ssm_pool has dstate \(axis 3\) 15"),
    ({"ssm_pool": torch.zeros(4, 4, 8, 16, dtype=torch.int8)}, DtypeError, "ssm_pool is int8"),
    ({"ssm_pool": torch.zeros(1, 4, 8, 16).expand(4, -1, -1, -1)}, ShapeError, "ssm_pool has strides"),
    ({"chunk_size": 0}, ShapeError, "chunk_size is 0"),
    ({"out": torch.zeros(20, 4, 9)}, ShapeError, "out has shape"),
    ({"out": torch.zeros(20, 4, 8).half()}, DtypeError, "out is float16"),
    ({"out": torch.zeros(4, 20, 8).transpose(0, 1)}, ShapeError, "out has strides"),
    ({"out": torch.zeros(20, 4, 16)[..., ::2]}, ShapeError, "out has strides"),
    ({"z": torch.zeros(20, 4)}, ShapeError, "z has shape"),
    ({"query_start_loc": None}, DtypeError, "query_start_loc is None"),
    ({"B": torch.zeros(20, 2, 16, device="meta")}, ShapeError, "B is on meta, expected cpu"),
    ({"D": torch.zeros(4, device="meta")}, ShapeError, "D is on meta, expected cpu"),
    ({"out": torch.zeros(20, 4, 8, device="meta")}, ShapeError, "out is on meta, expected cpu"),
    ({"ssm_pool": torch.zeros(4, 4, 8, 16, device="meta")}, ShapeError, "ssm_pool is on meta, expected cpu"),
    ({"query_start_loc": ints(0, 8, 20).to("meta")}, ShapeError, "query_start_loc is on meta, expected cpu"),
    ({"cache_indices": ints(3, 0).to("meta")}, ShapeError, "cache_indices is on meta, expected cpu"),
    ({"x": torch.zeros(20, 4, 8).to_sparse(), "out": None}, ShapeError, "x has layout torch.sparse_coo"),
    ({"pad_slot_id": None}, DtypeError, "pad_slot_id is None"),
    ({"ssm_pool": torch.zeros(3000).as_strided((4, 4, 8, 16), (256, 128, 16, 1))}, ShapeError, "ssm_pool has strides"),
]


@pytest.mark.parametrize("changes, error, message", BAD_PREFILL)
def test_prefill_writes_nothing(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments, pool, out = prefill(**changes)
    before = pool.clone()
    with pytest.raises(error, match=message) as caught:
        cute_ssd.mamba_chunk_scan_varlen_inplace(**arguments)
    one_sentence(caught.value)
    assert torch.equal(pool, before) and (out == 5).all()


@pytest.mark.emulated("sm_100a")
def test_out_that_shares_memory(device: str) -> None:
    arguments, _, _ = prefill(device)
    with pytest.raises(ShapeError, match="out shares memory"):
        cute_ssd.mamba_chunk_scan_varlen_inplace(**{**arguments, "out": arguments["x"]})
    buffer = torch.randn(30, 4, 8, device=device)
    with pytest.raises(ShapeError, match="out shares memory"):
        cute_ssd.mamba_chunk_scan_varlen_inplace(**{**arguments, "x": buffer[:20], "out": buffer[10:]})
    buffer = torch.randn(40, 4, 8, device=device)
    cute_ssd.mamba_chunk_scan_varlen_inplace(**{**arguments, "x": buffer[:20], "out": buffer[20:]})


@pytest.mark.parametrize("num_seqs", [1, 3])
def test_initial_states_of_another_number_of_sequences(num_seqs: int) -> None:
    arguments, _, out = prefill(initial_states=torch.zeros(num_seqs, 4, 8, 16))
    for name in ("ssm_pool", "cache_indices", "has_initial_state"):
        del arguments[name]
    message = rf"initial_states has num_seqs \(axis 0\) {num_seqs}, expected 2"
    with pytest.raises(ShapeError, match=message) as caught:
        cute_ssd.mamba_chunk_scan_varlen(**arguments)
    one_sentence(caught.value)
    assert (out == 5).all()


def test_numbers_of_numpy() -> None:
    made = inputs(2, 20)
    want = cute_ssd.mamba_chunk_scan_combined(**made, chunk_size=64, dt_limit=(0.0, 0.0625))
    limit = (numpy.float32(0.0), numpy.float64(0.0625))
    got = cute_ssd.mamba_chunk_scan_combined(**made, chunk_size=numpy.int32(64), dt_limit=limit)
    assert torch.equal(got, want)
    arguments, _, out = prefill(chunk_size=numpy.int64(64), pad_slot_id=numpy.int32(-1))
    assert cute_ssd.mamba_chunk_scan_varlen_inplace(**arguments) is out


BAD_CHUNKS = [
    (ints(0, 9, 20), "no boundary at 8"),
    (ints(0, 8), "no boundary at 20"),
    (ints(0, 8, 8, 20), "empty chunk"),
    (ints(0, 8, 25), "ends at 25"),
]


@pytest.mark.parametrize("own, message", BAD_CHUNKS)
def test_bad_chunks(own: Tensor, message: str) -> None:
    arguments, _, out = prefill(cu_chunk_seqlens=own, return_chunk_states=True)
    for name in ("ssm_pool", "cache_indices", "has_initial_state"):
        del arguments[name]
    with pytest.raises(ShapeError, match=message) as caught:
        cute_ssd.mamba_chunk_scan_varlen(**arguments)
    one_sentence(caught.value)
    assert (out == 5).all()


BAD_DECODE: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": torch.zeros(3, 32)}, ShapeError, "x has 2 dimensions"),
    ({"state": torch.zeros(2, 4, 8, 16)}, ShapeError, r"state has batch \(axis 0\) 2, expected 3"),
    ({"state": torch.zeros(3, 4, 8, 17)}, ShapeError, "state has dstate"),
    ({"dt": torch.zeros(3, 5)}, ShapeError, "dt has nheads"),
    ({"A": torch.zeros(4, 8)}, ShapeError, "A has 2 dimensions"),
    ({"B": torch.zeros(3, 3, 16), "C": torch.zeros(3, 3, 16)}, ShapeError, "divisor"),
    ({"z": torch.zeros(3, 4, 9)}, ShapeError, "z has shape"),
    ({"state_batch_indices": ints(0, 1, 1)}, ShapeError, r"state_batch_indices\[2\] is 1, already named at 1"),
    ({"state_batch_indices": ints(0, 1, 3)}, ShapeError, r"state_batch_indices\[2\] is 3, expected a slot from 0 to 2"),
    ({"state_batch_indices": ints(0, 1)}, ShapeError, "state_batch_indices has batch"),
    ({"out": torch.zeros(3, 8, 4).transpose(1, 2)}, ShapeError, "out has strides"),
    ({"state": torch.zeros(3, 4, 8, 16, dtype=torch.int32)}, DtypeError, "state is int32"),
    ({"C": torch.zeros(3, 2, 16).bfloat16()}, DtypeError, "C is bfloat16"),
    ({"C": None}, DtypeError, "C is None"),
    ({"D": torch.tensor(1.0)}, ShapeError, r"D has 0 dimensions .* 1 \(nheads=4\) or 2 \(nheads=4, headdim=8\)"),
    (
        {"dt": torch.zeros(3)},
        ShapeError,
        r"dt has 1 dim.* 2 \(batch=3, nheads=4\) or 3 \(batch=3, nheads=4, headdim=8\)",
    ),
    ({"B": torch.zeros(3, 2, 16, device="meta")}, ShapeError, "B is on meta, expected cpu"),
    ({"D": torch.zeros(4, device="meta")}, ShapeError, "D is on meta, expected cpu"),
    ({"state": torch.zeros(3, 4, 8, 16, device="meta")}, ShapeError, "state is on meta, expected cpu"),
    ({"out": torch.zeros(3, 4, 8, device="meta")}, ShapeError, "out is on meta, expected cpu"),
    ({"state_batch_indices": ints(0, 1, 2).to("meta")}, ShapeError, "state_batch_indices is on meta, expected cpu"),
    ({"state": torch.zeros(3, 4, 8, 16).to_sparse()}, ShapeError, "state has layout torch.sparse_coo"),
    ({"state": torch.zeros(3, 8, 16)}, ShapeError, "x has 3 dimensions .* without heads"),
]


@pytest.mark.parametrize("changes, error, message", BAD_DECODE)
def test_decode_writes_nothing(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    made = {n: t[:, 0] if n != "A" else t for n, t in inputs(3, 1).items()}
    state = torch.randn(3, 4, 8, 16)
    before = state.clone()
    with pytest.raises(error, match=message) as caught:
        cute_ssd.selective_state_update(**{"state": state, **made, **changes})
    one_sentence(caught.value)
    assert torch.equal(state, before)


def test_errors_are_what_they_say() -> None:
    assert issubclass(ShapeError, ValueError)
    assert issubclass(DtypeError, TypeError)
    assert issubclass(UnsupportedError, NotImplementedError)


@pytest.mark.emulated("sm_100a")
def test_a_pool_that_shares_memory(device: str) -> None:
    arguments, pool, _ = prefill(device)
    x = pool.view(-1)[: 20 * 4 * 8].view(20, 4, 8)
    with pytest.raises(ShapeError, match="ssm_pool shares memory"):
        cute_ssd.mamba_chunk_scan_varlen_inplace(**{**arguments, "x": x})
    made = {n: t[:, 0] if n != "A" else t for n, t in inputs(3, 1, device=device).items()}
    state = torch.randn(3, 4, 8, 16, device=device)
    with pytest.raises(ShapeError, match="state shares memory"):
        cute_ssd.selective_state_update(state, **{**made, "x": state[..., 0]})


def test_bad_chunks_are_refused_even_when_not_returned() -> None:
    arguments, _, _ = prefill(cu_chunk_seqlens=ints(0, 9, 20))
    for name in ("ssm_pool", "cache_indices", "has_initial_state"):
        del arguments[name]
    with pytest.raises(ShapeError, match="no boundary at 8"):
        cute_ssd.mamba_chunk_scan_varlen(**arguments)


def test_explain_raises_what_the_call_raises() -> None:
    made = inputs(2, 20)
    with pytest.raises(DtypeError, match="dt is None"):
        cute_ssd.explain(cute_ssd.mamba_chunk_scan_combined, **{**made, "dt": None}, chunk_size=64)
    with pytest.raises(TypeError, match="too many positional"):
        cute_ssd.explain(cute_ssd.ssd_chunk_scan, *([made["x"]] * 9))
    row = {n: t[0] if n != "A" else t for n, t in made.items()}
    row["x"].requires_grad_()
    with pytest.raises(UnsupportedError, match="no_grad"):
        cute_ssd.explain(cute_ssd.mamba_chunk_scan_varlen, **row, query_start_loc=ints(0, 20))
    with pytest.raises(UnsupportedError, match="explain knows no function"):
        cute_ssd.explain([1])


def test_explain_every_function() -> None:
    made = inputs(2, 20)
    assert "GFLOP" in str(cute_ssd.explain(cute_ssd.mamba_chunk_scan_combined, **made, chunk_size=64))
    log_decay = -torch.rand(2, 4, 20)
    assert cute_ssd.explain(cute_ssd.ssd_chunk_scan, made["x"], log_decay, made["B"], made["C"]).tile == 64
    arguments, _, _ = prefill()
    assert cute_ssd.explain(cute_ssd.mamba_chunk_scan_varlen_inplace, **arguments).problem.num_seqs == 2
    headless = (torch.zeros(3, 5, 7), *[torch.zeros(3, 5)] * 2, torch.zeros(5, 7), *[torch.zeros(3, 7)] * 2)
    assert cute_ssd.explain(cute_ssd.selective_state_update, *headless).problem.decode


def test_explain_unknown() -> None:
    with pytest.raises(UnsupportedError, match="explain knows no function"):
        cute_ssd.explain(torch.add, torch.zeros(1))
    with pytest.raises(ShapeError, match="sm_999"):
        cute_ssd.explain(cute_ssd.mamba_chunk_scan_combined, **inputs(), chunk_size=64, arch="sm_999")
    with pytest.raises(UnsupportedError, match=r"dstate is 300.*CPU"):
        cute_ssd.explain(cute_ssd.mamba_chunk_scan_combined, **inputs(dstate=300), chunk_size=64, arch="sm_100a")
