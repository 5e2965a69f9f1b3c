"""`rollout bench --simulate` against closed forms, and schedules of broadcasts that are played through by hand."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import shlex
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from rollout.bench import report
from rollout.bench.fleet_model import PRESETS, FleetModel, Topology
from rollout.bench.http_cost import HttpCost
from rollout.bench.loads import LOADS, ServerInfo
from rollout.bench.measure import Comparison, Round, Spread
from rollout.bench.measure import Result as Measured
from rollout.bench.push import Result as Push
from rollout.bench.routing import fleet_cost, measure
from rollout.bench.simulate import COLUMNS, WALL_COLUMNS, simulate
from rollout.bench.simulation import Loop
from rollout.cli.bench import bench

DOCS = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text()

# 4 answers of 50 tokens a step; a step of an engine with 4 sequences takes 0.2 s; nothing else takes any time.
IDEAL = FleetModel(
    streams=4,
    single_tokens_per_second=10.0,
    loaded_tokens_per_second=20.0,
    loaded_streams=4,
    mean_tokens=50.0,
    tokens_cv=0.0,
    prompts_per_step=2,
    n=2,
    max_lag=50,
    train_seconds=0.0,
    train_us_per_token=0.0,
    weight_bytes=1.0,
    topology="star",
    link_bytes_per_second=1e12,
    hop_seconds=0.0,
    call_seconds=0.0,
    check_seconds=0.0,
    check_cv=0.0,
    receive_speed=1.0,
    server_us_per_token=0.0,
)
with_ = functools.partial(dataclasses.replace, IDEAL)


def run(fleet: FleetModel, engines: int = 1, steps: int = 20) -> Any:
    return simulate(fleet, engines, steps=steps, seed=0)


# -- engines


@pytest.mark.parametrize("engines", [1, 3])
def test_engines_alone_sample_what_was_measured(engines: int) -> None:
    result = run(IDEAL, engines)
    assert result.generated == pytest.approx(20.0 * engines, rel=1e-9)
    assert result.engines_busy == pytest.approx(1.0, rel=1e-9)
    assert result.wall == "engines"
    assert result.wall_tokens_per_second == pytest.approx(20.0 * engines)


def test_an_engines_speed_goes_through_both_measured_points() -> None:
    assert IDEAL.tokens_per_second(1, 1) == pytest.approx(10.0)
    assert IDEAL.tokens_per_second(1, 4) == pytest.approx(20.0)
    assert IDEAL.tokens_per_second(8, 4) == pytest.approx(40.0)  # one each of 4, and 4 have none
    assert IDEAL.token_seconds(2.5) == pytest.approx((0.1 + 0.2) / 2)


def test_lengths_have_their_mean_and_deviation() -> None:
    fleet = with_(tokens_cv=0.8, streams=4096, prompts_per_step=2048, loaded_streams=4096)
    lengths = [end - begin for end, _, begin, *_ in Loop(fleet, 1, 0)._open]
    mean = sum(lengths) / len(lengths)
    assert mean == pytest.approx(50.0, rel=0.05)
    assert math.sqrt(sum((x - mean) ** 2 for x in lengths) / len(lengths)) / mean == pytest.approx(0.8, rel=0.1)


def test_receiving_slows_down() -> None:
    """Full engines lose the rest of their speed for as long as they receive: a push of 2 s and a step, often."""
    result = run(with_(receive_speed=0.6, weight_bytes=2e12), engines=1)
    assert 0.2 < result.receiving < 1.0
    assert result.push_seconds == pytest.approx(2.2)
    assert result.generated == pytest.approx(20.0 * (1 - 0.4 * result.receiving), rel=1e-9)


def test_a_commit_that_recomputes_stops_generation() -> None:
    result = run(with_(recompute_seconds=1.5))
    seconds = result.totals.seconds
    assert result.totals.generated == pytest.approx(20.0 * (seconds - 1.5 * result.totals.pushes), rel=1e-9)


# -- a broadcast, played through


def chain(engines: int, slices: int) -> float:
    done: dict[tuple[int, int], float] = {}
    for engine in range(engines):
        for piece in range(slices):
            began = max(done.get((engine - 1, piece), 0.0), done.get((engine, piece - 1), 0.0))
            done[engine, piece] = began + 1
    return max(done.values())


def relays(engines: int, slices: int, fan_out: int) -> float:
    """Engine e's parent is (e - 1) // fan_out, with the trainer as 0; each sends a slice to its children in turn."""
    has: dict[tuple[int, int], float] = {(0, piece): 0.0 for piece in range(slices)}
    for sender in range(engines + 1):
        free = 0.0
        for piece in range(slices):
            for child in range(sender * fan_out + 1, min(sender * fan_out + fan_out, engines) + 1):
                free = max(free, has[sender, piece]) + 1
                has[child, piece] = free
    return max(has.values())


def binomial(engines: int) -> float:
    """gloo's: in round i, who has it sends the whole to the rank whose bit i differs."""
    have, rounds = {0}, 0
    while len(have) <= engines:
        have |= {rank | (1 << rounds) for rank in have if rank | (1 << rounds) <= engines}
        rounds += 1
    return float(rounds)


def broadcast(topology: Topology, engines: int, slices: int, fan_out: int = 2) -> float:
    """In units of one slice's transfer."""
    fleet = with_(
        topology=topology,
        weight_bytes=1000.0 * slices,
        slice_bytes=1000.0,
        link_bytes_per_second=1000.0 / 0.75,
        hop_seconds=0.25,
        fan_out=fan_out,
    )
    return fleet.broadcast_seconds(engines)


@pytest.mark.parametrize("engines", [1, 2, 7, 8, 33])
@pytest.mark.parametrize("slices", [1, 2, 9])
def test_broadcasts_take_what_their_schedules_do(engines: int, slices: int) -> None:
    whole = 0.75 * slices + 0.25
    assert broadcast("chain", engines, slices) == pytest.approx(chain(engines, slices))
    assert broadcast("binomial", engines, slices) == pytest.approx(binomial(engines) * whole)
    assert broadcast("star", engines, slices) == pytest.approx(engines * whole)
    for fan_out in (1, 2, 3):
        played = relays(engines, slices, fan_out)
        full = engines in {sum(fan_out**level for level in range(1, depth + 1)) for depth in range(1, 40)}
        bound = broadcast("relays", engines, slices, fan_out)
        assert bound == pytest.approx(played) if full else played <= bound <= played + fan_out


def test_the_slowest_check_counts() -> None:
    """E[max] = the integral of 1 - F^E."""
    fleet, engines = with_(check_seconds=10.0, check_cv=0.5), 64
    deviation = math.sqrt(math.log(1.25))
    law = NormalDist(math.log(10.0) - deviation**2 / 2, deviation)
    step = 0.01
    expected = sum((1 - law.cdf(math.log(x * step)) ** engines) * step for x in range(1, 20_000))
    result = run(fleet, engines, steps=200)
    assert result.push_seconds - 0.2 == pytest.approx(expected, rel=0.05)
    assert fleet.slowest_check(engines) == pytest.approx(expected, rel=0.05)
    assert fleet.slowest_check(1) < 10.0 < fleet.slowest_check(2)


# -- ingress, trainer, broadcast


def test_the_ingress_is_as_many_cores_as_servers() -> None:
    for servers in (1, 3):
        fleet = with_(server_us_per_token=20_000.0, server_us_per_request=500_000.0, servers=servers)
        # A request is 100 tokens: 2 s of CPU for them, half a second for itself.
        result = run(fleet, engines=16)
        assert result.generated == pytest.approx(servers * 40.0, rel=1e-9)
        assert result.wall == "ingress"
        assert result.wall_tokens_per_second == pytest.approx(servers * 40.0)


def test_a_busy_trainer_caps_generation() -> None:
    fleet = with_(train_seconds=30.0, train_us_per_token=5e4, max_lag=3)  # 40 s a step of 200 tokens
    result = run(fleet, engines=16)
    assert result.wall == "trainer"
    assert result.trainer_busy == pytest.approx(40.0 / 40.2)
    assert result.trained == pytest.approx(200 / 40.2)
    assert result.generated == pytest.approx(result.trained)
    assert result.engines_busy < 0.02
    assert (result.lag_p99, result.dropped) == (3, 0.0)


@pytest.mark.parametrize(
    ("overlap", "every", "cycle"),
    [(False, 1, 5.0 + 12.2), (True, 1, 12.2), (False, 4, 20.0 + 12.2), (True, 4, 20.0)],
)
def test_pushes_take_turns_with_steps_or_overlap(overlap: bool, every: int, cycle: float) -> None:
    fleet = with_(train_seconds=5.0, call_seconds=12.0, overlap_push=overlap, push_every=every, max_lag=9)
    result = run(fleet, engines=64, steps=40)
    assert result.trained == pytest.approx(every * 200 / cycle, rel=1e-6)
    assert result.totals.pushes == 40 // every
    assert result.wall == ("trainer" if every == 4 else "broadcast")


# -- staleness


@pytest.mark.parametrize(("engines", "waves"), [(1, 3), (2, 2), (4, 1)])
def test_in_turn_nothing_is_stale(engines: int, waves: int) -> None:
    """Sample, train, push: the times add up."""
    fleet = with_(prompts_per_step=2 * waves * engines, train_seconds=7.0, call_seconds=4.8, max_lag=0)
    result = run(fleet, engines)
    assert set(result.totals.lags) == {0}
    tokens = waves * engines * 4 * 50
    assert result.trained == pytest.approx(tokens / (waves * 50 * 0.2 + 7.0 + 5.0))
    assert result.generated == pytest.approx(result.trained)


def test_a_lag_of_one_hides_a_short_step_of_the_trainer() -> None:
    """One batch is sampled while the other is trained and pushed: the engines never wait."""
    fleet = with_(train_seconds=3.0, call_seconds=2.0, max_lag=1)
    result = run(fleet)
    assert result.engines_busy == pytest.approx(1.0)
    # The push after 5.2 s of a batch's 10: 5.2 s by the version before, then 4.8 s by the one that it begins.
    assert result.lag_mean == pytest.approx(0.52)
    assert result.lag_p99 == 1


def test_a_bounded_lag_bounds_what_is_open() -> None:
    """300 engines and 51 batches of 4: at most 204 answers are open, each at the speed of an engine of its own."""
    result = run(with_(mean_tokens=500.0), engines=300)
    assert result.wall == "lag"
    assert result.wall_tokens_per_second == pytest.approx(204 * 10 / (1 + 0.2 / 50))  # 50 s in an engine, 0.2 s after
    assert result.generated == pytest.approx(result.wall_tokens_per_second, rel=0.03)


def test_groups_that_are_dropped_make_room_for_new_ones() -> None:
    result = run(with_(tokens_cv=2.0, max_lag=2), steps=200)
    assert result.dropped > 0.1
    assert result.engines_busy > 0.95


FLEETS = st.builds(
    FleetModel,
    streams=st.integers(1, 6),
    single_tokens_per_second=st.just(10.0),
    loaded_tokens_per_second=st.floats(10.0, 40.0),
    loaded_streams=st.just(4),
    mean_tokens=st.floats(5.0, 200.0),
    tokens_cv=st.sampled_from([0.0, 0.5, 1.5]),
    prompts_per_step=st.integers(1, 5),
    n=st.integers(1, 4),
    max_lag=st.integers(0, 4),
    train_seconds=st.floats(0.0, 20.0),
    train_us_per_token=st.floats(0.0, 1e5),
    push_every=st.integers(1, 3),
    overlap_push=st.booleans(),
    weight_bytes=st.floats(1.0, 1e9),
    topology=st.sampled_from(["chain", "binomial", "star", "relays"]),
    check_cv=st.just(0.0),
    recompute_seconds=st.sampled_from([0.0, 2.0]),
    server_us_per_token=st.sampled_from([0.0, 2e4]),
    mtbf_hours=st.sampled_from([None, 1.0]),
)


@settings(max_examples=60, deadline=None)
@given(fleet=FLEETS, engines=st.integers(1, 5), seed=st.integers(0, 99))
def test_no_fleet_breaks_its_bounds(fleet: FleetModel, engines: int, seed: int) -> None:
    loop = Loop(fleet, engines, seed)
    loop.run(12)
    totals, walls = loop.totals, fleet.walls(engines)
    assert all(0 <= lag < (fleet.max_lag + 1) * fleet.push_every for lag in totals.lags)
    assert sum(totals.lags.values()) == pytest.approx(totals.trained)
    assert totals.trained + totals.dropped + totals.lost <= totals.generated * (1 + 1e-9)
    assert totals.generated <= min(walls["engines"], walls["ingress"]) * totals.seconds * (1 + 1e-9)
    seconds_of_training = loop.steps * fleet.train_seconds + totals.trained * fleet.train_us_per_token * 1e-6
    seconds_of_pushing = totals.pushes * fleet.push_seconds(1)
    least = max(seconds_of_training, seconds_of_pushing)
    if not fleet.overlap_push:
        least = seconds_of_training + seconds_of_pushing
    # The trainer may be in a step that isn't over.
    assert totals.seconds + fleet.batch_seconds(totals.trained) >= least * (1 - 1e-9)
    if not fleet.tokens_cv and not fleet.mtbf_hours:
        assert totals.dropped == 0.0  # answers end in the order in which they began


@settings(max_examples=30, deadline=None)
@given(fleet=FLEETS, engines=st.integers(1, 5))
def test_the_lowest_wall_bounds_what_is_trained(fleet: FleetModel, engines: int) -> None:
    fleet = dataclasses.replace(fleet, tokens_cv=0.0, mtbf_hours=None)
    result = run(fleet, engines, steps=12 * fleet.push_every)
    # What the window begins and ends with differs by the answers that may be open at most.
    slack = fleet.most_begun * fleet.mean_tokens / result.totals.seconds
    assert result.trained <= result.wall_tokens_per_second * (1 + 1e-9) + slack
    name, lowest = fleet.wall(engines)
    assert (name, lowest) == (result.wall, result.wall_tokens_per_second)
    assert lowest <= min(fleet.walls(engines).values()) * (1 + 1e-9)


@settings(max_examples=20, deadline=None)
@given(engines=st.integers(1, 12), cv=st.sampled_from([0.0, 1.0]), streams=st.integers(1, 4))
def test_more_engines_never_sample_less_where_nothing_else_binds(engines: int, cv: float, streams: int) -> None:
    fleet = with_(tokens_cv=cv, streams=streams, prompts_per_step=30)
    assert run(fleet, engines + 1, steps=5).generated > run(fleet, engines, steps=5).generated


def test_the_same_seed_gives_the_same_run() -> None:
    first, again, other = (simulate(FleetModel(), 8, steps=3, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


# -- failures


def test_failures_cost_what_the_formula_says() -> None:
    """A restart of 10 s, and half of the work in progress, every 1,000 s of each engine."""
    fleet = with_(mtbf_hours=1000 / 3600, restart_seconds=10.0, prompts_per_step=64, max_lag=5)
    result = run(fleet, engines=64, steps=1000)
    lifetimes = 64 * result.totals.seconds * (1 - 10 / 1010) / 1000
    assert result.totals.failures == pytest.approx(lifetimes, rel=4 / math.sqrt(lifetimes))
    useful = (result.totals.generated - result.totals.lost) / result.totals.seconds / (64 * 20.0)
    assert 1 - useful == pytest.approx(result.failure_loss, rel=0.1)
    assert result.failure_loss == pytest.approx((10 + 25 * 0.2) / 1010)


def test_a_failure_during_a_push_begins_it_anew() -> None:
    """Time to a push of s seconds that no failure (rate f) interrupts: (exp(f s) - 1) / f."""
    fleet = with_(mtbf_hours=1000 / 3600, restart_seconds=0.0, call_seconds=49.8)
    result = run(fleet, engines=16, steps=600)
    rate = 16 / 1000
    assert result.push_seconds == pytest.approx(math.expm1(rate * 50.0) / rate, rel=0.1)


# -- the command


def invoke(*arguments: str, code: int = 0) -> str:
    ran = CliRunner().invoke(bench, list(arguments), env={"COLUMNS": "200"})
    assert ran.exit_code == code, ran.output
    return ran.output


def simulated(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    file = tmp_path / "simulated.json"
    invoke("--simulate", "--engines", "8", "--steps", "2", "--json", str(file), *arguments)
    return json.loads(file.read_text())


def test_the_command_shows_a_table_and_writes_json(tmp_path: Path) -> None:
    figures = simulated(tmp_path, "--engines", "16", "--train-us-per-token", "0", "--train-seconds", "0")
    assert [row["engines"] for row in figures["results"]] == [8, 16]
    assert figures["results"][0]["walls"]["trainer"] is None
    assert figures["fleet"] == dataclasses.asdict(FleetModel(train_us_per_token=0.0, train_seconds=0.0))
    assert {"cpu", "cores"} <= figures["machine"].keys()
    printed = invoke("simulate", "--engines", "16", "--steps", "2", "--train-us-per-token=0", "--train-seconds=0")
    result = simulate(FleetModel(**figures["fleet"]), 16, steps=2, seed=0)
    assert figures["results"][1]["generated"] == result.generated
    for columns in (COLUMNS, WALL_COLUMNS):
        assert re.search(r"\s+".join(re.escape(cell(result)) for cell in columns.values()), printed)


def test_flags_win_over_measurements_and_those_over_the_preset(tmp_path: Path) -> None:
    made = Push("keep", 538_000_000, 3.5, 0.0015, 0.2, 0.5, 1.0, True, 19.1, 13.6)
    server, other = ServerInfo("http://a", None, "m", "1", 4096, 100), ServerInfo("http://b", None, "m", "1", 4096, 100)
    compared = [
        Comparison(LOADS[name], [Measured(s, [Round(seconds, 1, LOADS[name].output_tokens, 0.0)]) for s in servers])
        for name, seconds, servers in [
            ("single", 2.0, [server, other]),
            ("grpo", 8.0, [server]),
            ("group", 8.0, [other]),
        ]
    ]
    spread = Spread(9.0, 9.0, 9.0)
    costs = [HttpCost("json", Spread(7.5, 7.0, 8.0), spread, spread), HttpCost("sse", spread, spread, spread)]
    files = {"load": report.loads_json(compared), "http": {"costs": costs}, "push": {"pushes": [made]}}
    options = ["--preset", "8b-gpu", "--receive-speed", "0.5", "--prompts-per-step", "16"]
    for name, figures in files.items():
        report.save(tmp_path / f"{name}.json", figures)
        options += ["--from", str(tmp_path / f"{name}.json")]
    assert simulated(tmp_path, *options)["fleet"] == dataclasses.asdict(
        FleetModel(
            **PRESETS["8b-gpu"]
            | {"single_tokens_per_second": 64.0, "loaded_tokens_per_second": 1024.0, "loaded_streams": 64}
            | {"weight_bytes": 538e6, "link_bytes_per_second": 538e6 / 3.5, "receive_speed": 0.5}
            | {"server_us_per_token": 7.5, "prompts_per_step": 16}
        )
    )


def test_what_can_not_be_is_refused(tmp_path: Path) -> None:
    assert "--streams" in invoke("--simulate", "--streams", "0", code=2)
    assert "receive_speed is 1.5" in invoke("--simulate", "--receive-speed", "1.5", code=2)
    assert "more than 64 sequences" in invoke("--simulate", "--loaded-tokens-per-second", "99999", code=2)
    assert "less than one sequence's" in invoke("--simulate", "--loaded-tokens-per-second", "9", code=2)
    assert "hardly any would get through" in invoke("--simulate", "--mtbf-hours", "0.01", code=1)
    for text, said in [('{"starts": []}', "no figures of"), ("[1]", "isn't what"), ('{"loads": [{}]}', "KeyError")]:
        (tmp_path / "other.json").write_text(text)
        printed = invoke("--simulate", "--from", str(tmp_path / "other.json"), code=1)
        assert said in printed
        assert "other.json" in printed


# -- routing


def test_routing_is_charged_by_the_thread_clock_after_a_round_of_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that a choice puts forward by 30 µs."""
    now = [0.0]
    monkeypatch.setattr("rollout.bench.routing.time", SimpleNamespace(thread_time=lambda: now[0]))
    calls: list[int] = []

    def choose(prompt: int) -> None:
        calls.append(prompt)
        now[0] += 30e-6 if len(calls) > 3 else 1.0  # the first round warms up

    assert measure(choose, [1, 2, 3], rounds=4).max == pytest.approx(30.0)
    assert calls == [1, 2, 3] * 5


def test_the_server_routes_a_load_at_a_cost_that_is_told() -> None:
    cost = fleet_cost(LOADS["singles"], 3, 0, 100, 1)
    assert cost.ranks == 3
    assert 0 < cost.per_token.median < cost.per_request.median
    assert cost.per_output_token == pytest.approx(cost.per_request.median / 128 + cost.per_token.median)


# -- the page


def page() -> list[tuple[str, list[list[str]]]]:
    """(command, rows with their header) of each table that stands below a command."""
    found = []
    for section in re.split(r"^## ", DOCS, flags=re.MULTILINE):
        for block in re.split(r"^```sh\n", section, flags=re.MULTILINE)[1:]:
            command, below = block.split("\n```\n")
            for lines in re.findall(r"(?:^\|.*\n)+", below, re.MULTILINE):
                rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines.splitlines()]
                found.append((command, [rows[0], *rows[2:]]))
    return found


@functools.cache
def printed(command: str) -> tuple[list[list[str]], list[list[str]]]:
    """The rows of both tables that this command prints."""
    program, name, *arguments = shlex.split(command)
    assert (program, name) == ("rollout", "bench")
    rows = [line.split() for line in invoke(*arguments).splitlines() if re.match(r" +[0-9]+ +[0-9]", line)]
    return rows[: len(rows) // 2], rows[len(rows) // 2 :]


def number(text: str) -> float:
    return float(text.rstrip("%").replace(",", ""))


@pytest.mark.long
def test_the_tables_of_the_page_are_what_the_commands_print() -> None:
    tables = page()
    assert len(tables) == 6
    for command, (header, *rows) in tables:
        if header[0] == "flags":
            got = [printed(f"{command} {row[0].strip('`')}".strip())[0][0] for row in rows]
        else:
            got = printed(command)["lag wall" in header]
            assert [row[0] for row in rows] == [row[0] for row in got]
        for row, theirs in zip(rows, got, strict=True):
            for name, shown, figure in zip(header[1:], row[1:], theirs[1:], strict=True):
                if name == "wall":
                    assert shown == figure
                else:  # another machine's logarithm may differ in its last bit
                    slack = 1.5 if shown.endswith("%") else 0.11
                    assert number(figure) == pytest.approx(number(shown), rel=0.03, abs=slack)


def test_what_the_page_says_of_files_is_in_the_help() -> None:
    commands = re.findall(r"^    rollout bench (.*?)(?:  +#.*)?$", DOCS, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        name = command.split()[0]
        options = re.findall(r"(?<=\s)--[a-z-]+", " " + command)
        shown = invoke(*(["load"] if name == "--url" else ["simulate"] if name == "--simulate" else [name]), "--help")
        assert all(option in shown for option in options if option != "--simulate")
