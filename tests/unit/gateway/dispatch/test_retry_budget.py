from vecd.gateway.dispatch.retry_budget import RetryBudget

MAX_BATCH_TOKENS = 100


def test_it_starts_full_and_pays_no_more_than_it_has():
    budget = RetryBudget(MAX_BATCH_TOKENS)
    assert all(budget.pay(100) for _ in range(16))
    assert not budget.pay(1)


def test_what_it_cannot_pay_costs_nothing():
    budget = RetryBudget(MAX_BATCH_TOKENS)
    assert not budget.pay(1601)
    assert budget.pay(1600)


def test_two_tokens_done_pay_for_one_up_to_what_it_holds():
    budget = RetryBudget(MAX_BATCH_TOKENS)
    assert budget.pay(1600)
    budget.earn(100)
    assert budget.pay(50)
    assert not budget.pay(1)
    budget.earn(1_000_000)
    assert budget.num_tokens == 1600


def test_it_holds_as_much_for_each_worker_and_keeps_it_when_they_die():
    budget = RetryBudget(MAX_BATCH_TOKENS)
    assert budget.pay(600)
    budget.make_room_for(3)
    assert budget.num_tokens == 1000 + 2 * 1600
    budget.make_room_for(0)
    assert budget.num_tokens == 1000 + 2 * 1600
    budget.earn(1_000_000)
    assert budget.num_tokens == 3 * 1600
