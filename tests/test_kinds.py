"""Kinds of calls: what makes arguments those of another one, and which are recognised at once."""

from __future__ import annotations

from typing import NamedTuple
from unittest import mock

import cases
import numpy as np
import pytest
import torch

from moe_engine import BackendError, Buffer, DtypeError, Options, choice_cache, kinds
from moe_engine.checks import packed
from moe_engine.prepared import PreparedCalls, with_size


class Named(torch.Tensor):
    """A class of tensors of its own, which torch's functions pass on to their results."""


class NamedParameter(torch.nn.Parameter):
    """A class of parameters, of which torch's functions return plain tensors."""


def rows(*shape, offset=0, dtype=torch.float32):
    """Zeros that begin `offset` items after a multiple of 16 bytes."""
    size = torch.Size(shape).numel()
    memory = torch.zeros(size + offset + 16, dtype=dtype)
    first = -(memory.data_ptr() // memory.itemsize) % 16
    return memory[first + offset :][:size].view(shape)


def wants_gradient():
    return rows(4, 8).requires_grad_()


X, Y, S = rows(4, 8), rows(4, 8), rows(3, 2)
REST = None, 3, True, "fp8"
LIKE = {  # arguments of the same kind as (X, Y, None, 3, True, "fp8"), S
    "the same": ((X, Y, None, 3, True, "fp8"), S),
    "other memory": ((rows(4, 8), rows(4, 8), None, 3, True, "fp8"), rows(3, 2)),
    "exchanged": ((Y, X, None, 3, True, "fp8"), S),
    "another first size": ((X, Y, None, 3, True, "fp8"), rows(5, 2)),
    "one row": ((X, Y, None, 3, True, "fp8"), rows(1, 2)),
    "equal options": ((X, Y, None, int("3"), bool(1), "".join(["fp", "8"])), S),
}
UNLIKE = {
    "a shape": ((rows(4, 9), Y, None, 3, True, "fp8"), S),
    "a number of dimensions": ((rows(4, 8, 1), Y, None, 3, True, "fp8"), S),
    "strides": ((rows(8, 4).t(), Y, None, 3, True, "fp8"), S),
    "strides of the second": ((X, rows(4, 16)[:, ::2], None, 3, True, "fp8"), S),
    "a dtype": ((rows(4, 8, dtype=torch.int32), Y, None, 3, True, "fp8"), S),
    "a place in 16 bytes": ((rows(4, 8, offset=1), Y, None, 3, True, "fp8"), S),
    "another place in 16 bytes": ((rows(4, 8, offset=2), Y, None, 3, True, "fp8"), S),
    "the place of the last": ((X, Y, None, 3, True, "fp8"), rows(3, 2, offset=1)),
    "a device": ((torch.zeros(4, 8, device="meta"), Y, None, 3, True, "fp8"), S),
    "a gradient": ((wants_gradient(), Y, None, 3, True, "fp8"), S),
    "a gradient of the second": ((X, wants_gradient(), None, 3, True, "fp8"), S),
    "a parameter": ((torch.nn.Parameter(rows(4, 8)), Y, None, 3, True, "fp8"), S),
    "a frozen parameter": ((torch.nn.Parameter(rows(4, 8), False), Y, None, 3, True, "fp8"), S),
    "a subclass": ((NamedParameter(rows(4, 8)), Y, None, 3, True, "fp8"), S),
    "twice the same": ((X, X, None, 3, True, "fp8"), S),
    "the same as the last": ((S, Y, None, 3, True, "fp8"), S),
    "no memory": ((rows(0, 8), Y, None, 3, True, "fp8"), S),
    "no rows": ((X, Y, None, 3, True, "fp8"), rows(0, 2)),
    "a tensor more": ((X, Y, rows(1), 3, True, "fp8"), S),
    "a tensor at another place": ((X, None, Y, 3, True, "fp8"), S),
    "a second size of the last": ((X, Y, None, 3, True, "fp8"), rows(3, 3)),
    "none at the end": ((X, Y, None, 3, True, "fp8"), None),
    "a number": ((X, Y, None, 4, True, "fp8"), S),
    "a type of number": ((X, Y, None, 3.0, True, "fp8"), S),
    "numpy's number": ((X, Y, None, np.int64(3), True, "fp8"), S),
    "a flag": ((X, Y, None, 3, False, "fp8"), S),
    "a number for a flag": ((X, Y, None, 3, 1, "fp8"), S),
    "a name": ((X, Y, None, 3, True, "bf16"), S),
    "a tuple": (((X, Y), None, 3, True, "fp8"), S),
    "an argument more": ((X, Y, None, 3, True, "fp8", None), S),
    "the last among the others": ((X, Y, None, 3, True, "fp8", S), ()),
}


def kind_of(calls, case):
    args, last = case
    return calls.describe(*args, sized=last if last == () else (last,)).kind


@pytest.fixture(params=[True, False], ids=["torch compares", "torch does not"])
def calls(request, monkeypatch):
    """Calls, with and without torch's comparison, which is private."""
    if not request.param:
        monkeypatch.setattr(kinds, "TensorGuards", None)
    calls = PreparedCalls()
    calls.compares = request.param
    return calls


@pytest.mark.parametrize("name", LIKE)
def test_the_same_kind(calls, name):
    first = kind_of(calls, LIKE["the same"])
    with mock.patch.object(calls, "_describe", side_effect=calls._describe) as slowly:
        assert kind_of(calls, LIKE[name]) is first
    assert slowly.call_count == (0 if calls.compares else 1)


@pytest.mark.parametrize("name", UNLIKE)
def test_another_kind(calls, name):
    first = kind_of(calls, LIKE["the same"])
    other = kind_of(calls, UNLIKE[name])
    assert other is not first
    for _ in range(2):  # either of them may be asked for first
        assert kind_of(calls, UNLIKE[name]) is other
        assert kind_of(calls, LIKE["the same"]) is first


def test_more_kinds_than_are_asked_for_first(calls):
    with mock.patch.object(kinds, "_comparison", side_effect=kinds._comparison) as made:
        found = [kind_of(calls, ((X, number), S)) for number in range(2 * kinds.MOST_RECENT)]
        assert len(set(found)) == len(found)
        for number, kind in enumerate(found):
            assert kind_of(calls, ((X, number), S)) is kind
    assert not calls.compares or made.call_count == len(found)
    listed = [each for recent in calls._recent.values() for each in recent.kinds.values()]
    assert all(len(each) <= kinds.MOST_RECENT for each in listed)


def test_other_numbers_of_tokens_are_recognised_at_once(calls):
    """However many there are in turn."""
    cases = [((rows(tokens, 8), Y, "fp8"), S) for tokens in range(1, 5 * kinds.MOST_RECENT)]
    found = [kind_of(calls, case) for case in cases]
    with mock.patch.object(calls, "_describe", side_effect=calls._describe) as slowly:
        assert [kind_of(calls, case) for case in cases] == found
    assert slowly.call_count == (0 if calls.compares else len(cases))


def test_grad_mode_is_part_of_a_kind(calls):
    case = (wants_gradient(), Y), S
    first = kind_of(calls, case)
    with torch.no_grad():
        other = kind_of(calls, case)
    assert other is not first
    assert kind_of(calls, case) is first


def test_tensors_of_inference_mode(calls):
    """They have other dispatch keys, by which torch's comparison tells them apart."""

    def is_found_at_once(case, kind):
        with mock.patch.object(calls, "_describe", side_effect=calls._describe) as slowly:
            assert kind_of(calls, case) is kind
        return slowly.call_count == 0

    with torch.no_grad():
        first = kind_of(calls, LIKE["the same"])
    for made_in_it in (False, True):
        with torch.inference_mode():
            case = LIKE["the same"] if not made_in_it else ((rows(4, 8), rows(4, 8), *REST), S)
            assert kind_of(calls, case) is first
            assert is_found_at_once(case, first) == calls.compares
        with torch.no_grad():
            assert is_found_at_once(LIKE["the same"], first) == calls.compares


def test_a_choice_that_is_kept_makes_other_kinds(calls, monkeypatch):
    first = kind_of(calls, LIKE["the same"])
    monkeypatch.setattr(choice_cache, "num_kept", choice_cache.num_kept + 1)
    assert kind_of(calls, LIKE["the same"]) is not first


def test_what_torch_cannot_compare(calls):
    """Its comparison ends the process at a tensor without strides."""
    kind_of(calls, LIKE["the same"])
    nested = torch.nested.nested_tensor([rows(4, 8), rows(2, 8)])
    for one in (X.to_sparse(), nested, X.to_sparse_csr()):
        described = calls.describe(one, Y, None, 3, True, "fp8", sized=(S,))
        assert described.tensors is None


def test_tensors_of_a_class_whose_results_are_of_it(calls):
    """What is recorded of a call are the plain tensors in them, so none is made again."""
    case = (rows(4, 8).as_subclass(Named), Y), S
    assert calls.describe(*case[0], sized=(case[1],)).tensors is None


def test_what_torch_may_not_compare(calls):
    """A class of tensors may have other strides, or none."""
    case = (NamedParameter(rows(4, 8)), Y), S
    first = kind_of(calls, case)
    with mock.patch.object(calls, "_describe", side_effect=calls._describe) as slowly:
        assert kind_of(calls, case) is first
    assert slowly.call_count == 1


def test_an_unusable_option_has_no_kind(calls):
    assert calls.describe(X, Y, None, [3], {}, "fp8", sized=(S,)).tensors is None


class Pair(NamedTuple):
    name: str
    limit: float


def test_tuples_of_options_are_found_at_once(calls):
    """By their values and the types of these."""
    first = kind_of(calls, ((X, Pair("a", 1.0)), S))
    others = [(X, Pair("a", 1)), (X, Pair("a", True)), (X, Pair("b", 1.0)), (X, ("a", 1.0))]
    found = [kind_of(calls, (other, S)) for other in others]
    assert len({first, *found}) == 1 + len(others)
    with mock.patch.object(calls, "_describe", side_effect=calls._describe) as slowly:
        assert kind_of(calls, ((X, Pair("a", 1.0)), S)) is first
        assert [kind_of(calls, (other, S)) for other in others] == found
    assert slowly.call_count == (0 if calls.compares else 1 + len(others))


def test_tensors_in_a_tuple_after_numbers(calls):
    """As in a call that is refused, and one that is right."""
    kind_of(calls, ((X, (0.0, 0.0)), S))
    other = kind_of(calls, ((X, (Y, rows(4, 8))), S))
    assert kind_of(calls, ((X, (0.0, 0.0)), S)) is not other


@pytest.mark.parametrize("in_tuple", [(Y,), (X,), ([1],), ((1,),)])
def test_tuples_that_torch_does_not_compare(calls, in_tuple):
    first = kind_of(calls, ((X, in_tuple), S))
    with mock.patch.object(calls, "_describe", side_effect=calls._describe) as slowly:
        assert kind_of(calls, ((X, in_tuple), S)) is first
    assert slowly.call_count == 1


def test_kinds_that_went_are_not_found_again(monkeypatch):
    calls = PreparedCalls()
    monkeypatch.setattr(kinds, "MOST_KINDS", 1)
    first = kind_of(calls, LIKE["the same"])
    kind_of(calls, UNLIKE["a number"])
    assert kind_of(calls, LIKE["the same"]) is not first


def test_addresses_are_those_of_the_tensors(calls):
    for case in (LIKE["the same"], LIKE["other memory"]):
        described = calls.describe(*case[0], sized=(case[1],))
        expected = [case[0][0], case[0][1], case[1]]
        assert all(one is other for one, other in zip(described.tensors, expected, strict=True))
        assert list(described.addresses) == [one.data_ptr() for one in expected]
        more = described.more((expected[0], None, new := rows(2), new))
        assert more.tensors[-1] is new
        assert len(more.tensors) == len(described.tensors) + 1
        assert list(more.addresses) == [*described.addresses, new.data_ptr()]


# --- What follows from a kind --------------------------------------------------------------------


def test_packed_tensors_stay_themselves():
    for shape in ((4, 8), (1, 8), (4, 1), (0, 8), ()):
        x = rows(*shape)
        assert packed(x) is x
    one_row = rows(1, 8).as_strided((1, 8), (3, 1))
    assert packed(one_row).stride() == (8, 1)
    assert packed(one_row).data_ptr() == one_row.data_ptr()
    assert packed(rows(4, 8, offset=1)).data_ptr() % 16 == 0


def grow(owner, x, sized, num_rows):
    return with_size("num_rows", (x.new_empty(num_rows, 3), x.new_empty(num_rows))), x.new_empty(2)


def test_results_with_as_many_rows_as_come():
    calls = PreparedCalls()
    for num_rows in (3, 5, 1, 0, 4):
        (two, one), fixed = calls(grow, None, X, sized=(rows(num_rows, 2),), num_rows=num_rows)
        assert (two.shape, one.shape, fixed.shape) == ((num_rows, 3), (num_rows,), (2,))
        assert two.is_contiguous()
    assert len(calls) == 1


def test_results_of_a_class_of_tensors():
    calls = PreparedCalls()
    for num_rows in (3, 5, 1):
        before, x = mock.Mock(), X.as_subclass(Named)
        more = dict(before=before, sized=(rows(num_rows, 2),), num_rows=num_rows)
        (two, _), _ = calls(grow, None, x, **more)
        assert type(two) is Named
        assert two.shape == (num_rows, 3)
        before.assert_called_once_with(x)
    assert not len(calls)


def change_what_is_given(group):
    """Verbs with arguments of the same and of other kinds in turn, against those of a Buffer that
    keeps none."""
    device, generator = cases.device(), torch.Generator().manual_seed(0)
    num_tokens, hidden, num_experts, num_topk = 6, 128, 4, 2
    sizes, options = (num_tokens, hidden, num_experts, num_topk), Options(decode_tokens=num_tokens)
    buffer, plain = (Buffer.for_tokens(group, *sizes, options=options) for _ in range(2))

    def draw(tokens=num_tokens):
        x = torch.randn(tokens, hidden, generator=generator).bfloat16().to(device)
        idx = torch.rand(tokens, num_experts, generator=generator).argsort(1)[:, :num_topk]
        return x, idx.to(device), torch.rand(tokens, num_topk, generator=generator).to(device)

    def unaligned(x):
        return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)

    def strided(x):
        return torch.stack([x, x], -1)[..., 0]

    def calls(buffer, x, idx, weights):
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, num_experts)
        counts = None, per_rank, None, in_rank, per_expert
        most = 1, 2 * num_tokens
        got, got_idx, got_weights, _, handle, _ = buffer.dispatch(x, *counts, idx, weights, *most)
        yield per_rank, per_expert, in_rank, got[: len(x)], got_idx, got_weights[: len(x)]
        got, *_ = buffer.dispatch(x, *counts, idx, weights)
        handle = handle._replace(recv_src_idx=handle.recv_src_idx[: len(got)])
        yield buffer.dispatch(x, handle)[0], *buffer.combine(got, handle)[:2]
        few = num_tokens, num_experts
        rows, count, low, _, _ = buffer.low_latency_dispatch(x, idx, *few, use_fp8=False)
        y = rows.nan_to_num(0.0)
        yield count, buffer.low_latency_combine(y, idx, weights, low)[0]

    rounds = [draw(), draw(), draw(1), draw(1), draw(4)]
    rounds += [tuple(map(change, draw())) for change in (unaligned, strided, strided)]
    rounds += [draw(), draw(1), draw(0), draw(0), draw()]
    for number, given in enumerate(rounds):
        with mock.patch.object(kinds, "MOST_KINDS", 0):
            wanted = [part for parts in calls(plain, *given) for part in parts]
        found = [part for parts in calls(buffer, *given) for part in parts]
        for place, (want, have) in enumerate(zip(wanted, found, strict=True)):
            same = want is have is None or torch.equal(want, have)
            assert same, f"round {number}, result {place}"
    refuse_after_all(buffer, *draw(), num_experts)
    buffer.destroy()
    plain.destroy()


def refuse_after_all(buffer, x, idx, weights, num_experts):
    """What is refused though arguments that differ in little else have passed."""
    few = len(x), num_experts
    dispatch, combine = buffer.low_latency_dispatch, buffer.low_latency_combine
    rows, _, low, _, _ = dispatch(x, idx, *few, use_fp8=False)
    combine(rows, idx, weights, low)
    x = x.requires_grad_()
    with pytest.raises(BackendError, match="x requires grad"):
        dispatch(x, idx, *few, use_fp8=False)
    with torch.no_grad():
        dispatch(x, idx, *few, use_fp8=False)
    x = x.detach()
    with pytest.raises(DtypeError, match="use_fp8"):
        dispatch(x, idx, *few, use_fp8=0.0)
    with pytest.raises(DtypeError, match="x is float32"):
        dispatch(x.float(), idx, *few, use_fp8=False)
    with pytest.raises(DtypeError, match="topk_weights"):
        combine(rows, idx, weights.double(), low)
    with pytest.raises(DtypeError, match="async_finish"):
        buffer.get_dispatch_layout(idx, num_experts, None, "yes")
    dispatch(x, idx, *few, use_fp8=False)


def test_verbs_with_changing_arguments(pool):
    pool.run(change_what_is_given, num_ranks=1)


def describe_no_more(group):
    """How many arguments of calls that were made before are described in all detail."""
    device = cases.device()
    buffer = Buffer.for_tokens(group, 4, 128, 4, 2, options=Options(decode_tokens=4))
    x = torch.ones(4, 128, dtype=torch.bfloat16, device=device)
    idx = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]], device=device)
    weights = torch.ones(4, 2, device=device)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 4)
    counts = None, per_rank, None, in_rank, per_expert
    got, _, got_weights, _, handle, _ = buffer.dispatch(x, *counts, idx, weights, 1, 4)
    rows, _, low, _, _ = buffer.low_latency_dispatch(x, idx, 4, 4, use_fp8=False)

    def send_and_receive():
        *_, hook = buffer.low_latency_dispatch(x, idx, 4, 4, return_recv_hook=True)
        hook()

    verbs = {
        "layout": lambda: buffer.get_dispatch_layout(idx, 4),
        "dispatch": lambda: buffer.dispatch(x, *counts, idx, weights, 1, 4),
        "cached": lambda: buffer.dispatch(x, handle),
        "combine": lambda: buffer.combine(got, handle, got_weights),
        "low_latency_dispatch": lambda: buffer.low_latency_dispatch(x, idx, 4, 4),
        "low_latency_combine": lambda: buffer.low_latency_combine(rows, idx, weights, low),
        "hook": send_and_receive,
    }
    seen = {}
    for name, verb in verbs.items():
        verb()
        with mock.patch.object(kinds.Kinds, "_describe", side_effect=AssertionError) as slowly:
            verb()
        seen[name] = slowly.call_count
    buffer.destroy()
    return seen


def test_calls_are_recognised_at_once(pool):
    (seen,) = pool.run(describe_no_more, num_ranks=1)
    assert seen == dict.fromkeys(seen, 0)
