"""Order among tenants and jobs, and the service that tenants get on a simulated server."""

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import pytest

from loraplex.engine.counters import Counters
from loraplex.engine.fairness import BrokenQueue, FairQueue
from loraplex.engine.protocol import Policy


@dataclass(eq=False)
class Job:
    tenant: str
    priority: int = 0
    arrived: float = 0.0
    prompt: int = 1
    output: int = 1


def anyone(_: Job) -> bool:
    return True


def serve(queue: FairQueue[Job], counters: Counters) -> Job:
    job = queue.peek(anyone)
    assert job is not None
    queue.take(job)
    counters.charge(job.tenant, job.prompt)
    return job


def served(queue: FairQueue[Job], counters: Counters, jobs: int) -> str:
    return "".join(serve(queue, counters).tenant for _ in range(jobs))


class TestCounters:
    def test_output_costs_more_and_weight_divides(self):
        counters = Counters(input_cost=1, output_cost=2)
        counters.set_policy("a", Policy(weight=4))
        counters.charge("a", prompt_tokens=8, generated_tokens=4)
        assert counters.value("a") == 4
        assert counters.tokens("a") == (8, 4, 0)

    def test_cached_tokens_are_free(self):
        counters = Counters()
        counters.charge("a", cached_tokens=64)
        assert counters.value("a") == 0
        assert counters.tokens("a") == (0, 0, 64)

    def test_newest_policy_holds_and_keeps_the_counter(self):
        counters = Counters()
        counters.charge("a", 10)
        counters.set_policy("a", Policy(weight=2, max_running=3))
        assert counters.policy("a").max_running == 3
        counters.charge("a", 10)
        assert counters.value("a") == 15

    def test_lift_never_lowers(self):
        counters = Counters()
        counters.charge("a", 10)
        counters.lift("a", 5)
        assert counters.value("a") == 10
        counters.lift("a", 12)
        assert counters.value("a") == 12

    def test_unknown_tenants_have_the_default_policy(self):
        assert Counters().policy("nobody") == Policy()
        assert Counters().value("nobody") == 0


class TestTenants:
    def test_one_that_floods_does_not_delay_another(self):
        counters = Counters()
        queue: FairQueue[Job] = FairQueue(counters)
        for _ in range(100):
            queue.push(Job("a"))
        for _ in range(2):
            queue.push(Job("b"))
        assert served(queue, counters, 6) == "ababaa"

    def test_weights_share_the_service(self):
        counters = Counters()
        counters.set_policy("b", Policy(weight=3))
        queue: FairQueue[Job] = FairQueue(counters)
        for tenant in "ab" * 40:
            queue.push(Job(tenant))
        assert served(queue, counters, 40).count("b") == 30

    def test_equal_counters_take_turns(self):
        queue: FairQueue[Job] = FairQueue(Counters())
        for tenant in "aabbcc":
            queue.push(Job(tenant))
        order = []
        while job := queue.peek(anyone):
            queue.take(job)
            order.append(job.tenant)
        assert "".join(order) == "abcabc"

    def test_idleness_earns_nothing(self):
        counters = Counters()
        queue: FairQueue[Job] = FairQueue(counters)
        queue.push(Job("b"))
        for _ in range(60):
            queue.push(Job("a"))
        served(queue, counters, 50)
        for _ in range(10):
            queue.push(Job("b"))
        assert served(queue, counters, 10).count("a") == 5

    def test_running_alone_earns_nothing_either(self):
        counters = Counters()
        queue: FairQueue[Job] = FairQueue(counters)
        queue.push(Job("b"))
        queue.started(serve(queue, counters))
        for _ in range(60):
            queue.push(Job("a"))
        served(queue, counters, 50)
        for _ in range(10):
            queue.push(Job("b"))
        assert served(queue, counters, 10).count("a") == 5

    def test_an_empty_queue_lifts_to_the_last_served(self):
        counters = Counters()
        queue: FairQueue[Job] = FairQueue(counters)
        queue.push(Job("a", prompt=70))
        serve(queue, counters)
        queue.push(Job("b"))
        assert counters.value("b") == 70

    def test_caps_let_the_next_tenant_pass_and_earn_nothing(self):
        counters = Counters()
        queue: FairQueue[Job] = FairQueue(counters)
        for tenant in ["a"] * 20 + ["b"] * 80:
            queue.push(Job(tenant))
        for _ in range(50):
            job = queue.peek(lambda job: job.tenant != "a")
            assert job is not None
            queue.take(job)
            counters.charge(job.tenant, 1)
        queue.push(Job("c"))
        assert counters.value("c") == 50
        assert served(queue, counters, 8) == "abcababa"

    def test_nobody_is_admissible(self):
        queue: FairQueue[Job] = FairQueue(Counters())
        queue.push(Job("a"))
        assert queue.peek(lambda job: False) is None
        assert len(queue) == 1

    def test_each_tenant_is_asked_about_one_job(self):
        queue: FairQueue[Job] = FairQueue(Counters())
        for tenant in "aaabbb":
            queue.push(Job(tenant))
        asked: list[Job] = []
        queue.peek(lambda job: bool(asked.append(job)))
        assert [job.tenant for job in asked] == ["a", "b"]

    def test_the_longest_idle_are_forgotten(self):
        counters = Counters()
        queue: FairQueue[Job] = FairQueue(counters, remember=3)
        queue.push(Job("waits"))
        for tenant in "abcde":
            counters.set_policy(tenant, Policy())
            job = Job(tenant)
            queue.push(job)
            queue.remove(job)
        assert [known.tenant for known in queue.services()] == ["waits", "d", "e"]


class TestJobs:
    def test_priority_then_arrival(self):
        counters = Counters()
        queue: FairQueue[Job] = FairQueue(counters)
        jobs = [Job("a", 1, 0.0), Job("a", 0, 2.0), Job("a", 0, 1.0), Job("a", -1, 3.0)]
        for job in jobs:
            queue.push(job)
        assert [serve(queue, counters) for _ in jobs] == [jobs[i] for i in (3, 2, 1, 0)]

    def test_ageing_outweighs_priority(self):
        counters = Counters()
        queue: FairQueue[Job] = FairQueue(counters, age_s=10)
        old, young, late = Job("a", 1, 0.0), Job("a", 0, 9.0), Job("a", 0, 11.0)
        for job in (late, young, old):
            queue.push(job)
        assert [serve(queue, counters) for _ in range(3)] == [young, old, late]

    def test_the_preempted_goes_first(self):
        counters = Counters()
        queue: FairQueue[Job] = FairQueue(counters)
        preempted = Job("a", priority=9, arrived=5.0)
        queue.push(Job("a"))
        queue.push_preempted(preempted)
        assert serve(queue, counters) is preempted

    def test_victims_are_taken_from_the_end(self):
        counters = Counters()
        counters.charge("rich", 100)
        queue: FairQueue[Job] = FairQueue(counters)
        rich, late, urgent, early = Job("rich"), Job("a", 0, 2.0), Job("a", -1, 3.0), Job("a")
        assert queue.order([rich, late, urgent, early]) == [urgent, early, late, rich]

    def test_remove_says_whether_it_was_there(self):
        queue: FairQueue[Job] = FairQueue(Counters())
        jobs = [Job("a") for _ in range(3)]
        for job in jobs:
            queue.push(job)
        assert queue.remove(jobs[1])
        assert not queue.remove(jobs[1])
        assert list(queue) == [jobs[0], jobs[2]]
        with pytest.raises(KeyError):
            queue.take(jobs[1])

    def test_a_removed_job_can_come_back(self):
        counters = Counters()
        queue: FairQueue[Job] = FairQueue(counters)
        first, second = Job("a"), Job("a")
        for job in (first, second):
            queue.push(job)
        queue.remove(first)
        queue.push(first)
        assert [serve(queue, counters) for _ in range(2)] == [second, first]
        assert queue.peek(anyone) is None

    def test_of_preempted_jobs_of_one_rank_the_oldest_goes_first(self):
        counters = Counters()
        queue = FairQueue[Job](counters, age_s=4.0)
        older, newer = Job("a", priority=1, arrived=1.0), Job("a", priority=0, arrived=5.0)
        for job in (newer, older):
            queue.push_preempted(job)
        assert [serve(queue, counters) for _ in range(2)] == [older, newer]


class TestBooks:
    def test_services_count_jobs_and_tokens(self):
        counters = Counters()
        queue: FairQueue[Job] = FairQueue(counters)
        queue.push(Job("a", prompt=5))
        queue.push(Job("a", prompt=5))
        queue.started(serve(queue, counters))
        counters.charge("a", generated_tokens=1)
        assert queue.services() == [("a", 7.0, 5, 1, 0, 1, 1)]

    def test_integrity_notices_a_start_that_was_not_told(self):
        queue: FairQueue[Job] = FairQueue(Counters())
        with pytest.raises(BrokenQueue, match="runs 1, not 0"):
            queue.check_integrity([Job("a")])

    def test_integrity_notices_a_job_in_two_places(self):
        queue: FairQueue[Job] = FairQueue(Counters())
        job = Job("a")
        queue.push(job)
        queue.started(job)
        with pytest.raises(BrokenQueue, match="runs and waits"):
            queue.check_integrity([job])


PROMPT, OUTPUT, MEMORY = 24, 16, 160  # most tokens of a prompt, of a completion, of all that runs


@dataclass
class Server:
    """Continuous batching with memory for `MEMORY` tokens, reserved when a job is admitted."""

    weights: dict[str, float]
    counters: Counters = field(default_factory=Counters)
    running: list[list] = field(default_factory=list)  # job, tokens left
    served: dict[str, float] = field(default_factory=dict)  # cost over weight

    def __post_init__(self) -> None:
        self.queue: FairQueue[Job] = FairQueue(self.counters)
        for tenant, weight in self.weights.items():
            self.counters.set_policy(tenant, Policy(weight=weight))
            self.served[tenant] = 0.0

    def step(self) -> None:
        self.admit()
        self.decode()

    def admit(self) -> None:
        while (job := self.queue.peek(anyone)) and self.fits(job):
            self.queue.take(job)
            self.queue.started(job)
            self.running.append([job, job.output])
            self.charge(job.tenant, prompt_tokens=job.prompt)

    def decode(self) -> None:
        for entry in list(self.running):
            self.charge(entry[0].tenant, generated_tokens=1)
            entry[1] -= 1
            if entry[1] == 0:
                self.running.remove(entry)
                self.queue.ended(entry[0])

    def fits(self, job: Job) -> bool:
        return (
            sum(job.prompt + job.output for job in [job, *(r for r, _ in self.running)]) <= MEMORY
        )

    def charge(self, tenant: str, prompt_tokens: int = 0, generated_tokens: int = 0) -> None:
        self.counters.charge(tenant, prompt_tokens, generated_tokens)
        self.served[tenant] += (prompt_tokens + 2 * generated_tokens) / self.weights[tenant]


def jobs_of(tenant: str, seed: int) -> Iterator[Job]:
    """Each tenant has its own habits: short or long prompts, short or long completions."""
    rng = random.Random(seed)
    most_prompt, most_output = rng.choice([4, PROMPT]), rng.choice([4, OUTPUT])
    for number in count():
        prompt, output = rng.randint(1, most_prompt), rng.randint(1, most_output)
        yield Job(tenant, 0, float(number), prompt, output)


def bound(weights: dict[str, float]) -> float:
    """Theorem 4.4 of Sheng et al. (OSDI 2024); with weights, for the least of them."""
    return 2 * max(PROMPT, 2 * MEMORY) / min(weights.values())


def keep_busy(server: Server, streams: dict[str, Iterator[Job]]) -> None:
    for tenant, stream in streams.items():
        while server.queue.waiting(tenant) < MEMORY:
            server.queue.push(next(stream))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tenants", [2, 10])
@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_service_gap_stays_within_the_bound(tenants: int, weight: float, seed: int):
    weights = {f"t{i}": weight if i % 2 else 1.0 for i in range(tenants)}
    server = Server(weights)
    streams = {tenant: jobs_of(tenant, seed * 100 + i) for i, tenant in enumerate(weights)}
    least = dict.fromkeys(weights, 0.0)  # of the gap to the first tenant, over time
    most = dict.fromkeys(weights, 0.0)
    for _ in range(400):
        keep_busy(server, streams)
        server.step()
        for tenant in weights:
            gap = server.served[tenant] - server.served["t0"]
            least[tenant], most[tenant] = min(least[tenant], gap), max(most[tenant], gap)
            assert most[tenant] - least[tenant] <= bound(weights)
    assert server.served["t0"] > 4 * bound(weights) / tenants


@pytest.mark.parametrize("seed", range(4))
def test_a_tenant_that_returns_gets_its_share_and_no_more(seed: int):
    server = Server({"busy": 1.0, "back": 1.0})
    busy, back = jobs_of("busy", seed), jobs_of("back", seed + 50)
    server.queue.push(next(back))
    for _ in range(300):
        keep_busy(server, {"busy": busy})
        server.step()
    before = dict(server.served)
    assert before["busy"] - before["back"] > bound(server.weights)
    for _ in range(300):
        keep_busy(server, {"busy": busy, "back": back})
        server.step()
        gained = {tenant: server.served[tenant] - before[tenant] for tenant in before}
        assert abs(gained["busy"] - gained["back"]) <= bound(server.weights)


@pytest.mark.parametrize("seed", range(4))
def test_the_server_never_idles_while_jobs_wait(seed: int):
    server = Server({"a": 1.0, "b": 3.0, "c": 1.0})
    rng = random.Random(seed)
    pending = deque(next(jobs_of(rng.choice("abc"), number)) for number in range(200))
    while pending or len(server.queue) or server.running:
        for _ in range(min(len(pending), rng.randrange(6))):
            server.queue.push(pending.popleft())
        server.admit()
        first = server.queue.peek(anyone)
        assert first is None or not server.fits(first)
        server.queue.check_integrity([job for job, _ in server.running])
        server.decode()
    server.queue.check_integrity([])


def test_a_thousand_tenants_and_ten_thousand_jobs():
    counters = Counters()
    queue: FairQueue[Job] = FairQueue(counters)
    for number in range(10_000):
        queue.push(Job(f"t{number % 1000}", number % 7, float(number)))
    first = [serve(queue, counters).tenant for _ in range(1000)]
    assert len(set(first)) == 1000
    queue.check_integrity([])
