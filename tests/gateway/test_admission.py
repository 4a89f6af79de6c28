import pytest

from gateway.admission import Admission
from gateway.errors import TooManyRequests


def test_a_permit_is_returned_whatever_happens():
    admission = Admission(max_requests=1, max_queued_tokens=100)
    with pytest.raises(RuntimeError), admission.permit(10):
        raise RuntimeError
    with admission.permit(10):
        assert (admission.num_requests, admission.num_tokens) == (1, 10)
    assert (admission.num_requests, admission.num_tokens) == (0, 0)


def test_too_many_requests_are_refused_with_limit_and_value():
    admission = Admission(max_requests=1, max_queued_tokens=100)
    with (
        admission.permit(1),
        pytest.raises(TooManyRequests, match="1 requests are being served, at most 1"),
        admission.permit(1),
    ):
        pass


def test_too_many_tokens_are_refused_with_limit_and_value():
    admission = Admission(max_requests=9, max_queued_tokens=100)
    with (
        admission.permit(90),
        pytest.raises(TooManyRequests, match=r"90 tokens .* adds 11, at most 100"),
        admission.permit(11),
    ):
        pass


def test_a_lone_request_is_admitted_however_large():
    with Admission(max_requests=9, max_queued_tokens=100).permit(10_000):
        pass


@pytest.mark.parametrize(("rate", "low", "high"), [(1e9, 1, 1), (1000.0, 2, 60), (0.001, 60, 60)])
def test_retry_after_is_the_drain_time_between_1_and_60_s(rate, low, high):
    admission = Admission(max_requests=9, max_queued_tokens=10_000)
    for _ in range(100):
        admission.observe_rate(rate)
    with admission.permit(9000), pytest.raises(TooManyRequests) as caught, admission.permit(2000):
        pass
    assert low <= int(caught.value.headers()["retry-after"]) <= high
