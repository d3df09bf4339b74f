"""The real controller against stand-ins: a calm step, and every fault of a scenario."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from grpo_operator.cli import plan
from grpo_rehearsal.durations import Assumptions
from grpo_rehearsal.job import RehearsedJob, read_job
from grpo_rehearsal.main import main
from grpo_rehearsal.report import agent_memory
from grpo_rehearsal.report.summary import summary
from grpo_rehearsal.report.text import as_text
from grpo_rehearsal.run import Outcome, rehearse
from grpo_rehearsal.scenario import Scenario, parse_pair

SAMPLES = 64
Rehearse = Callable[[Scenario], Outcome]


def test_the_operators_objects_are_rendered(small_job: RehearsedJob) -> None:
    arguments = small_job.engine_arguments
    assert arguments["tp-size"] == "4" and arguments["max-running-requests"] == "16"
    assert small_job.config.rollout_service.startswith("small-")
    assert small_job.memory_of("trainer", "ray-worker") == "600Gi"


def test_a_calm_step_consumes_each_sample_once_and_fills_the_engines(rehearsed: Rehearse) -> None:
    outcome = rehearsed(Scenario(steps=2))
    figures = summary(outcome)
    assert figures["phase"] == "Succeeded" and len(figures["steps"]) == 2
    assert figures["ledger"] == {"samples": 2 * SAMPLES, "consumed_twice": 0, "missing": 0}
    assert figures["generation"]["responses"] == 2 * SAMPLES
    assert figures["generation"]["most_running"] == figures["generation"]["capacity"] == 32
    assert figures["generation"]["in_flight_share"] > 0.9
    for phases in figures["steps"]:
        named = sum(phases[name] for name in ("gen", "old_log_prob", "ref", "update_actor", "update_weights"))
        assert phases["step"] == pytest.approx(named, rel=0.01)
    assert 0 < figures["idle_share"]["rollout"] < 1 and 0 < figures["idle_share"]["trainer"] < 1


def test_a_step_with_a_place_for_each_sample_has_no_share_in_flight(
    small_manifest: Path, tmp_path: Path
) -> None:
    outcome = rehearse(read_job(small_manifest, prompts=8), Scenario(), tmp_path / "few")
    figures = summary(outcome)
    assert figures["generation"]["responses"] == figures["generation"]["capacity"] == 32
    assert figures["generation"]["in_flight_share"] is None
    assert "at most 32 of 32 places, one for each sample" in as_text(figures)


def test_fewer_places_are_all_taken_until_the_last_samples(small_manifest: Path, tmp_path: Path) -> None:
    job = read_job(small_manifest, prompts=8, running=8)
    assert job.engine_arguments["max-running-requests"] == "8"
    figures = summary(rehearse(job, Scenario(), tmp_path / "fewer"))
    assert figures["generation"]["capacity"] == 16 < figures["generation"]["responses"]
    assert 0.9 < figures["generation"]["in_flight_share"] <= 1


def test_the_same_rehearsal_runs_in_the_same_way(rehearsed: Rehearse) -> None:
    first, second = (summary(rehearsed(Scenario(name=name))) for name in ("one", "two"))
    for field in ("calls", "status", "links", "generation", "steps"):
        for steps in (first, second):
            for phases in steps["steps"]:
                phases.pop("controller_cpu", None)
        assert first[field] == second[field], field


def test_all_bytes_are_counted_by_link(rehearsed: Rehearse) -> None:
    links = summary(rehearsed(Scenario()))["links"]
    assert links["engine>controller"] > 64 * 400 * 10
    assert links["controller>trainer"] > 64 * 400 * 4
    assert links["trainer>engine"] > 2 * 8e9 * 2  # two versions of 8 B parameters into two engines


def test_little_more_than_the_batch_leaves_the_controller(rehearsed: Rehearse) -> None:
    """Layouts, kept regions and plans travel among the ranks and to the engines."""
    outcome = rehearsed(Scenario())
    figures = summary(outcome)
    assert 1 < figures["egress_ratio"] < 1.2
    (join,) = figures["joins"]["engines"]
    assert join["problem"] == "" and min(join["table"], join["kept"], join["receives"], join["sends"]) > 0
    assert figures["links"]["trainer>trainer"] == figures["joins"]["layout_bytes"] + 2 * join["sends"]
    assert figures["links"]["engine>trainer"] == figures["joins"]["kept_bytes"] == 2 * join["kept"]
    reads = 4 * join["table"] + join["receives"]
    assert [agent.received["link"] for agent in outcome.cluster.agents] == [reads] * 2


def test_links_live_on_when_an_engine_is_replaced(rehearsed: Rehearse) -> None:
    """Both versions of two steps go over the links of the start; a dead engine alone gets another one."""
    calm = rehearsed(Scenario(name="calm", steps=2))
    assumed = Assumptions(engine_restart=5.0)
    death = rehearsed(Scenario(name="death", steps=2, engine_deaths=((1, 2.0),), assumed=assumed))
    for outcome, joins in ((calm, [1, 1]), (death, [1, 2])):
        assert summary(outcome)["phase"] == "Succeeded"
        kinds = [[kind for _, _, kind in agent.updates] for agent in outcome.cluster.agents]
        assert [of_agent.count("link") for of_agent in kinds] == joins
        exchanges = [end - begin for method, begin, end in outcome.cluster.record.rounds
                     if method == "exchange_layouts"]  # fmt: skip
        assert sum(seconds > 0 for seconds in exchanges) == 1


def test_ids_leave_the_controller_once_although_the_first_and_the_last_stage_read_them(
    two_nodes: RehearsedJob, tmp_path: Path
) -> None:
    outcome = rehearse(two_nodes, Scenario(), tmp_path / "run")
    figures = summary(outcome)
    (join,) = figures["joins"]["engines"]
    tokens = sum(line["tokens"] for line in outcome.ledger if "uid" in line)
    ids = figures["links"]["trainer>trainer"] - figures["joins"]["layout_bytes"] - 2 * join["sends"]
    assert 4 * tokens < ids < 4 * (tokens + SAMPLES * 512), "responses and their prompts"
    assert 1 < figures["egress_ratio"] < 1.2 < 1 + ids / figures["batch_bytes"]


def test_samples_of_a_dead_engine_are_generated_by_the_other(rehearsed: Rehearse) -> None:
    calm = summary(rehearsed(Scenario(name="calm")))
    middle = calm["steps"][0]["gen"] / 2
    outcome = rehearsed(Scenario(name="death", engine_deaths=((1, middle),)))
    figures = summary(outcome)
    assert figures["phase"] == "Succeeded"
    assert figures["ledger"] == {"samples": SAMPLES, "consumed_twice": 0, "missing": 0}
    assert [what for _, what in figures["events"]] == ["engine 1 dies"]
    assert figures["steps"][0]["gen"] > calm["steps"][0]["gen"]
    assert {line["engine"] for line in outcome.ledger if "engine" in line} >= {"small-rollout-0"}


def test_a_slow_engine_delays_the_step(rehearsed: Rehearse) -> None:
    calm, slow = (
        summary(rehearsed(Scenario(name=f"slow{len(engines)}", slow_engines=engines)))
        for engines in ((), ((0, 3.0),))
    )
    assert slow["steps"][0]["gen"] > 1.2 * calm["steps"][0]["gen"]


def test_a_slow_rank_delays_its_passes_and_nothing_else(rehearsed: Rehearse) -> None:
    calm, slow = (
        summary(rehearsed(Scenario(name=f"ranks{len(ranks)}", slow_ranks=ranks)))["steps"][0]
        for ranks in ((), ((3, 2.0),))
    )
    for phase in ("old_log_prob", "ref", "update_actor"):
        assert 1.5 * calm[phase] < slow[phase] <= 2.01 * calm[phase], "its replica may be less full"
    assert slow["gen"] == pytest.approx(calm["gen"]) and slow["update_weights"] == calm["update_weights"]


def test_a_slow_rank_is_named(rehearsed: Rehearse) -> None:
    outcome = rehearsed(Scenario(name="named", steps=6, slow_ranks=((3, 2.0),)))
    assert [step["own_time_s/stragglers"] for step in outcome.metrics] == [0, 0, 0, 0, 1, 1]
    assert outcome.metrics[0]["own_time_s/largest_ratio"] == pytest.approx(2.0, rel=0.2)


def test_a_late_agent_is_waited_for_and_comes_close_to_its_limit(rehearsed: Rehearse) -> None:
    figures = summary(rehearsed(Scenario(name="agent", late_agents=((1, 4.0),))))
    assert figures["phase"] == "Succeeded"
    (status,) = [entry for entry in figures["deadlines"] if entry["what"] == "http agent/v1/status"]
    assert status["limit"] / 4.0 == pytest.approx(status["margin"])


def test_without_an_agents_reports_the_other_engine_generates_everything(rehearsed: Rehearse) -> None:
    outcome = rehearsed(Scenario(name="silent", late_agents=((1, 6.0),)))
    assert summary(outcome)["phase"] == "Succeeded"
    assert {line["engine"] for line in outcome.ledger if "engine" in line} == {"small-rollout-0"}


def test_faults_of_parts_that_the_job_lacks_are_refused(rehearsed: Rehearse) -> None:
    for scenario, text in (
        (Scenario(slow_ranks=((8, 2.0),)), "no rank 8: the job has 8"),
        (Scenario(late_agents=((2, 1.0),)), "no engine 2: the job has 2"),
        (Scenario(dead_nodes=((0, 5.0), (1, 5.0))), "no node of the training pool 1: the job has 1"),
    ):
        with pytest.raises(ValueError, match=text):
            rehearsed(scenario)


def test_agents_memory_is_reported_as_planned_beside_the_measured_one(
    rehearsed: Rehearse, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(agent_memory, "RESULTS", tmp_path)
    outcome = rehearsed(Scenario())
    memory = summary(outcome)["memory"]["engine_agent"]
    assert outcome.job.plan.host is not None
    assert memory["planned"] == outcome.job.plan.host.agent > 0 and memory["measured_rss"] is None
    (tmp_path / "sync.json").write_text(json.dumps({"figures": {"agent_rss_mib_max": 100.0}}))
    memory = summary(outcome)["memory"]["engine_agent"]
    assert memory["measured_rss"] == 100 * 2**20 and "2 GB" in memory["measured_with"]


def test_a_hung_rank_is_named_within_a_minute_of_the_limit(rehearsed: Rehearse) -> None:
    outcome = rehearsed(Scenario(name="hang", hung_rank=(3, 23.0)))
    (hung,) = [when for when, what in outcome.cluster.events if what == "rank 3 hangs"]
    named = next(
        when for when, name, value in outcome.board.history if name == "message" and "rank 3" in value
    )
    limit = outcome.job.spec.restart_policy.hang_limit
    assert limit <= named - hung <= limit + 60
    figures = summary(outcome)
    assert outcome.board.get().attempt == 2 and figures["phase"] == "Succeeded"
    assert 0 <= figures["hang_named_seconds"] <= 60


def test_a_lost_training_pod_begins_another_attempt(rehearsed: Rehearse) -> None:
    outcome = rehearsed(Scenario(name="node", dead_nodes=((0, 23.0),)))
    assert outcome.board.get().attempt == 2 and summary(outcome)["phase"] == "Succeeded"
    assert outcome.board.get().restarts.infrastructure == 1
    assert summary(outcome)["lost_node_recovery_seconds"] > Assumptions().process_start


def test_late_engines_receive_the_staged_version(rehearsed: Rehearse) -> None:
    outcome = rehearsed(Scenario(name="late", late_engines=((0, 120.0), (1, 150.0))))
    assert summary(outcome)["phase"] == "Succeeded"
    assert outcome.cluster.agents[1].received["sync"] > 0


def test_every_deadline_comes_from_the_job(small_manifest: Path, tmp_path: Path) -> None:
    text = small_manifest.read_text()
    fields = "  restartPolicy: {hangSeconds: 500}\n  weightSync: {timeoutSeconds: 100}\n"
    small_manifest.write_text(text + fields)
    outcome = rehearse(read_job(small_manifest), Scenario(), tmp_path / "run")
    figures = summary(outcome)
    limits = {entry["what"]: entry["limit"] for entry in figures["deadlines"]}
    assert limits["tokens of a sample (restartPolicy.hangSeconds)"] == 500
    assert limits["progress in update_actor (restartPolicy.hangSeconds)"] == 500
    assert limits["a token (rollout.stallSeconds)"] == read_job(small_manifest).spec.stall_seconds
    assert limits["wave of a transfer (weightSync.timeoutSeconds)"] == 100
    assert limits["minAvailable engines serve a version (4 x timeoutSeconds)"] == 400
    assert limits["an engine serves the samples' version (4 x timeoutSeconds)"] == 400
    (join,) = [entry for entry in figures["deadlines"] if entry["what"].startswith("sign of life")]
    assert join["upper_bound"] and join["seconds"] == Assumptions().rendezvous + Assumptions().planning


def test_a_wave_of_a_transfer_is_a_part_of_it(rehearsed: Rehearse) -> None:
    outcome = rehearsed(Scenario())
    figures = summary(outcome)
    entries = {entry["what"]: entry for entry in figures["deadlines"]}
    wave = entries["wave of a transfer (weightSync.timeoutSeconds)"]
    transfers = [end - begin for method, begin, end in figures["calls"] if method == "send_weights"]
    (join,) = figures["joins"]["engines"]
    assert len(join["waves"]) > 3 and not wave["upper_bound"]
    assert 0 < wave["seconds"] < max(transfers), "three waves at most are on their way"
    progress = entries["progress in send_weights (restartPolicy.hangSeconds)"]
    assert 0 < progress["seconds"] <= wave["seconds"]


def test_waits_for_engines_that_come_late_are_seen(rehearsed: Rehearse) -> None:
    """Both engines die and come back after a minute; or both join late."""
    assumed = Assumptions(engine_restart=60.0)
    deaths = (0, 2.0), (1, 2.0)
    figures = summary(rehearsed(Scenario(name="away", engine_deaths=deaths, assumed=assumed)))
    assert figures["phase"] == "Succeeded"
    waits = {entry["what"]: entry["seconds"] for entry in figures["deadlines"]}
    assert 55 < waits["an engine serves the samples' version (4 x timeoutSeconds)"] < 90
    assert 55 < waits["a token (rollout.stallSeconds)"] < 120
    late = summary(rehearsed(Scenario(name="late", late_engines=((0, 100.0), (1, 100.0)))))
    waits = {entry["what"]: entry["seconds"] for entry in late["deadlines"]}
    assert 5 < waits["minAvailable engines serve a version (4 x timeoutSeconds)"] < 90


def test_engines_and_trainers_take_turns_on_shared_gpus(small_manifest: Path, tmp_path: Path) -> None:
    body = yaml.safe_load(small_manifest.read_text())
    spec, template = body["spec"], body["spec"]["rollout"]["template"]
    spec["mode"] = "colocated"
    del spec["trainer"]["resources"]
    spec["trainer"]["offload"] = {"parameters": True, "gradients": True, "optimizer": True}
    template["replicas"] = 1
    template["engine"] |= {"tensorParallel": 8, "gpusPerNode": 8, "memoryFraction": 0.8}
    spec["data"] |= {"train": "/data/prompts.jsonl"}
    spec["reward"] = {"builtin": "math"}
    small_manifest.write_text(yaml.safe_dump(body))
    outcome = rehearse(read_job(small_manifest), Scenario(name="turns", steps=2), tmp_path / "turns")
    assert summary(outcome)["phase"] == "Succeeded"
    (agent,) = outcome.cluster.agents
    turns = [begin for begin, _, kind in agent.updates if kind == "turn"]
    assert len(turns) >= 2 + 2 * 2, "once around the engines' start, and around each generation"
    waits = {entry["what"]: entry["seconds"] for entry in summary(outcome)["deadlines"]}
    assert waits["engines hold or release memory (4 x timeoutSeconds)"] >= Assumptions().memory_turn
    assert agent.received["sync"] > 0


def test_the_command_writes_the_report_and_a_picture(
    small_manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(small_manifest), "--output", str(tmp_path / "out"), "--sigma", "1.2"]) == 0
    assert "in flight" in capsys.readouterr().out
    figures = json.loads((tmp_path / "out" / "small-calm.json").read_text())
    assert figures["scenario"]["assumed"]["sigma"] == 1.2
    assert (tmp_path / "out" / "small-calm.svg").read_text().startswith("<?xml")


def test_the_operators_command_hands_over_to_the_rehearsal(
    small_manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--rehearse", str(small_manifest), "--prompts", "4", "--running", "8", "--json"]
    assert plan.main([*options, "--output", str(tmp_path / "out")]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["phase"] == "Succeeded" and figures["generation"]["capacity"] == 16
    assert json.loads((tmp_path / "out" / "small-calm.json").read_text()) == figures
    small_manifest.write_text("kind: Service")
    assert plan.main(["--rehearse", str(small_manifest)]) == 2
    assert "contains no object of kind GRPOJob" in capsys.readouterr().err


def test_help_names_the_assumed_share_of_the_response_length(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "30 % of data.responseLength" in " ".join(capsys.readouterr().out.split())


def test_bad_input_is_named(small_manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_manifest.write_text("kind: Service")
    assert main([str(small_manifest)]) == 2
    assert "contains no object of kind GRPOJob" in capsys.readouterr().err
    with pytest.raises(ValueError, match="'x' is not NUMBER:VALUE"):
        parse_pair("x")
