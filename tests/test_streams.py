"""What a call waits for, on streams that only keep count of what precedes what."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from moe_engine import (
    BackendError,
    Buffer,
    DtypeError,
    EventHandle,
    EventOverlap,
    ShapeError,
    low_latency_verbs,
)
from moe_engine import streams as streams_module
from moe_engine.streams import DEFAULT_STREAM, CallStreams

GPU = torch.device("cuda", 0)


class Stream:
    """`done`: the names of all work that precedes what comes next. `capture`: None or a number."""

    device_index = 0

    def __init__(self, device=None, priority=0):
        self.done, self.capture, self.priority = frozenset(), None, priority
        self.cuda_stream = id(self)

    def work(self, name):
        """Put work here; returns what had to precede it."""
        before, self.done = self.done, self.done | {name}
        return before

    def wait_event(self, event):
        if event.capture is None:
            assert self.capture is None, "a capture waits for an event outside of it"
        else:
            assert event.capture in Stream.captures, "an event of a capture that is over"
            assert self.capture in (None, event.capture), "two captures meet"
            self.capture = event.capture
        self.done |= event.done

    def wait_stream(self, stream):
        event = Event()
        event.record(stream)
        self.wait_event(event)


class Event:
    def record(self, stream):
        self.done, self.capture = stream.done, stream.capture


@pytest.fixture
def caller(monkeypatch):
    """The current stream, in a torch.cuda of such streams."""

    @contextmanager
    def use(stream):
        before, Stream.current = Stream.current, stream
        try:
            yield
        finally:
            Stream.current = before

    Stream.current, Stream.captures = Stream(), set()
    fakes = {
        "Stream": Stream,
        "Event": Event,
        "stream": use,
        "current_stream": lambda device: Stream.current,  # without one torch counts the devices
        "set_stream": lambda stream: setattr(Stream, "current", stream),
        "is_current_stream_capturing": lambda: Stream.current.capture is not None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(streams_module, "current_device", lambda: 0)
    monkeypatch.setattr(streams_module, "INTERPRETED", False)
    monkeypatch.setattr(streams_module, "_has_gpu", lambda: True)
    monkeypatch.setattr(streams_module, "raw_stream", lambda index: Stream.current.cuda_stream)
    monkeypatch.setattr(streams_module, "_known_streams", {})
    return Stream.current


def call(streams, name, *args):
    """A call whose work is `name`: (what had to precede it, its event)."""
    with streams.call(*args) as running:
        before = Stream.current.work(name)
    return before, running.event


def test_a_plain_call_runs_on_the_current_stream(caller):
    streams = CallStreams(GPU)
    caller.work("input")
    before, event = call(streams, "call")
    assert before == {"input"}
    assert event.event is None
    assert "call" in caller.done


def test_an_asynchronous_call_waits_for_the_current_stream_and_gives_an_event(caller):
    streams = CallStreams(GPU)
    caller.work("input")
    before, event = call(streams, "call", None, True)
    assert before == {"input"}
    assert "call" not in caller.done
    assert streams.comm_stream().priority == -1
    event.current_stream_wait()
    assert "call" in caller.done


def test_events_within_events_are_waited_for(caller):
    streams = CallStreams(GPU)
    _, event = call(streams, "call", None, True)
    EventOverlap(EventOverlap(event)).wait()
    assert "call" in caller.done
    caller.work("later")
    before, _ = call(streams, "next", EventOverlap(EventOverlap(event)), True)
    assert "later" not in before


def test_previous_event_replaces_the_wait_for_the_current_stream(caller):
    streams = CallStreams(GPU)
    caller.work("input")
    previous = EventOverlap(EventHandle())
    caller.work("expert compute")
    for event in (previous, previous.event):
        before, _ = call(streams, "call", event, True, True)
        assert "input" in before
        assert "expert compute" not in before


def test_a_plain_call_waits_for_previous_event(caller):
    other = Stream()
    with torch.cuda.stream(other):
        other.work("elsewhere")
        previous = EventOverlap(EventHandle())
    before, _ = call(CallStreams(GPU), "call", previous)
    assert before == {"elsewhere"}


def test_calls_of_a_buffer_follow_each_other_on_any_streams(caller):
    streams = CallStreams(GPU)
    call(streams, "first", None, True)
    before, _ = call(streams, "second")
    assert "first" in before
    caller.work("compute")
    # After the second call, but not after what the caller did since.
    before, _ = call(streams, "third", event_of_nothing(), True)
    assert {"first", "second"} <= before
    assert "compute" not in before
    with torch.cuda.stream(Stream()):
        before, _ = call(streams, "fourth")
    assert "third" in before


def test_calls_on_the_default_stream_record_their_ends_once_there_are_others(caller):
    """The first call elsewhere waits for all that the default stream holds; later ones do not."""
    streams, caller.cuda_stream = CallStreams(GPU), DEFAULT_STREAM
    call(streams, "first")
    call(streams, "second")
    assert streams._end is None
    caller.work("compute")
    with torch.cuda.stream(Stream()):
        before, _ = call(streams, "third")
    assert before == {"first", "second", "compute"}
    before, _ = call(streams, "fourth")
    assert "third" in before
    caller.work("more")
    with torch.cuda.stream(Stream()):
        before, _ = call(streams, "fifth")
    assert "fourth" in before
    assert "more" not in before


def test_an_asynchronous_call_waits_for_one_on_the_default_stream(caller):
    streams, caller.cuda_stream = CallStreams(GPU), DEFAULT_STREAM
    call(streams, "first")
    before, _ = call(streams, "second", event_of_nothing(), True)
    assert before == {"first"}
    assert "second" not in caller.done
    before, _ = call(streams, "third")
    assert "second" in before


def event_of_nothing():
    """An event on a stream that has done nothing."""
    with torch.cuda.stream(Stream()):
        return EventHandle()


@contextmanager
def captured(stream, number):
    """A CUDA graph capture that begins on `stream` and must end with every stream joined to it."""
    Stream.captures.add(number)
    outside, stream.capture = stream.done, number
    yield
    stream.capture, stream.done = None, outside
    Stream.captures.remove(number)


def test_captured_calls_wait_within_their_graph_only(caller):
    streams = CallStreams(GPU)
    call(streams, "eager", None, True)
    comm = streams.comm_stream()
    for number in (1, 2):
        with captured(caller, number):
            _, event = call(streams, "asynchronous", None, True)
            assert comm.capture == number
            before, _ = call(streams, "plain")
            assert "asynchronous" in before
            event.current_stream_wait()
            call(streams, "last")
            comm.capture = None
    before, _ = call(streams, "eager again", None, True)
    assert "eager" in before


def test_an_eager_call_waits_for_the_last_eager_one_whatever_was_captured_since(caller):
    streams, side = CallStreams(GPU), Stream()
    with torch.cuda.stream(side):
        call(streams, "on another stream")
    with captured(caller, 1):
        call(streams, "captured")
    before, _ = call(streams, "eager")
    assert "on another stream" in before


class Used:
    """A tensor that keeps note of the streams by which it is used."""

    is_cuda = True

    def __init__(self):
        self.streams = []

    def record_stream(self, stream):
        self.streams.append(stream)


def test_memory_is_kept_for_the_streams_that_use_it(caller):
    slots, given, result = Used(), Used(), Used()
    streams = CallStreams(GPU)
    streams.uses("slots", slots)
    with streams.call() as running:
        running.reads(given, None)
        running.returns(result)
    assert not slots.streams + given.streams + result.streams
    with streams.call(None, True) as running:
        running.reads(given, None)
        running.returns(result)
    comm = streams.comm_stream()
    assert (slots.streams, given.streams, result.streams) == ([comm], [comm], [caller])


def test_a_failed_call_gives_the_stream_back(caller):
    streams = CallStreams(GPU)
    with pytest.raises(ZeroDivisionError), streams.call(None, True):
        raise ZeroDivisionError
    assert Stream.current is caller


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_bad_flags_are_refused(caller, device):
    streams = CallStreams(torch.device(device))
    for flags in (
        (None, True, True),
        (EventOverlap(None), True, True),
        (EventHandle(), False, True),
    ):
        with pytest.raises(ShapeError, match="allocate_on_comm_stream needs"):
            call(streams, "call", *flags)
    for event in (object(), EventOverlap(object())):
        with pytest.raises(DtypeError, match="previous_event"):
            call(streams, "call", event)


def test_a_cpu_has_no_streams():
    streams = CallStreams(torch.device("cpu"))
    with pytest.raises(BackendError, match="no streams"):
        streams.comm_stream()
    with streams.call() as running:
        pass
    assert running.event.event is None
    with streams.call(EventOverlap(EventHandle()), True, True) as running:
        pass
    assert isinstance(running.event.event, EventHandle)


def test_event_overlap_in_all_its_forms(caller):
    other = Stream()
    with torch.cuda.stream(other):
        other.work("call")
        handle = EventHandle()
    empty = EventOverlap(None)
    empty.current_stream_wait()
    with empty, empty():
        pass
    assert empty.event is None
    assert not caller.done
    empty.event = handle
    ran = []
    empty.register_hook_after_wait(lambda: ran.append(set(caller.done)))
    with empty:
        assert not ran
    assert ran == [{"call"}]
    empty.current_stream_wait()
    assert len(ran) == 1
    event = EventOverlap(handle, (torch.ones(1),))
    with event(release_handle=True) as same:
        assert same is event
        assert event.event is handle
    assert event.event is None
    assert event.extra_tensors is None
    event = EventOverlap(handle)
    event.current_stream_wait(release_handle=True)
    assert event.event is None


def test_a_hook_keeps_what_its_stream_uses(caller, monkeypatch):
    """What the first half used is kept until the hook is gone, and its stream runs in order."""
    monkeypatch.setattr(low_latency_verbs, "leaves", lambda used: used)
    fine = SimpleNamespace(check=lambda: False)
    buffer = SimpleNamespace(_streams=CallStreams(GPU), _low_latency=fine)
    buffer._check_process = lambda: None
    used, received, other = Used(), [], Stream()
    receive = Buffer._receive.__wrapped__
    args = lambda: received.append(Stream.current), caller, (used, None)
    receive(buffer, *args)
    assert used.streams == []
    with torch.cuda.stream(other):
        receive(buffer, *args)
    assert used.streams == [other]
    assert received == [caller, other]


def test_a_call_that_is_not_asynchronous_keeps_nothing(caller):
    streams, one = CallStreams(GPU), Used()
    for is_async in (False, True):
        with streams.call(None, is_async) as running:
            assert running.is_async == is_async
            running.reads(one)
            running.returns(one)
    assert one.streams == [streams.comm_stream(), caller]
