"""Picture of a rehearsal's time line: sequences in flight, engines, ranks, weight updates and events."""

from pathlib import Path
from typing import Any

from grpo_rehearsal.report.summary import window_of
from grpo_rehearsal.run import Outcome

_COLOURS = {
    "log_probs": "#4c78a8",
    "reference_log_probs": "#72b7b2",
    "update_actor": "#f58518",
    "send_weights": "#54a24b",
    "publish_weights": "#b6d7a8",
    "save_checkpoint": "#e45756",
    "poll_checkpoint": "#eeca3b",
}
_OTHER, _ENGINE, _UPDATE = "#bab0ac", "#4c78a8", "#54a24b"


def draw(outcome: Outcome, figures: dict[str, Any], file: Path) -> None:
    """Write the picture of the steps to ``file`` (.svg or .png). ``figures``: see summary."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    window = window_of(outcome)
    mpl.rcParams["svg.hashsalt"] = "rehearsal"
    figure, (flight, lanes) = pyplot.subplots(
        2, 1, figsize=(11, 6.5), sharex=True, height_ratios=(2, 3), layout="constrained"
    )
    _flight(flight, figures["generation"])
    labels = _lanes(lanes, outcome, window)
    for when, what in outcome.cluster.events:
        for axis in (flight, lanes):
            axis.axvline(when, color="#e45756", linewidth=1)
        flight.annotate(what, (when, 0.97), xycoords=("data", "axes fraction"), fontsize=8, va="top")
    lanes.legend(
        handles=[mpl.patches.Patch(color=_COLOURS.get(name, _OTHER), label=name) for name in labels],
        loc="lower left", fontsize=8, ncols=4,
    )  # fmt: skip
    lanes.set_xlim(window[0], max(window[1], window[0] + 1))
    lanes.set_xlabel("virtual seconds")
    job = outcome.job
    figure.suptitle(
        f"{job.name}, {outcome.scenario.name}: {job.plan.layout.world} stand-in ranks, "
        f"{len(outcome.cluster.engines)} stand-in engines, the real controller"
    )
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    pyplot.close(figure)


def _flight(axis: Any, generation: dict[str, Any]) -> None:
    times = [time for time, _ in generation["running"]]
    running = [count for _, count in generation["running"]]
    waiting = [count for _, count in generation["waiting"]]
    axis.stackplot(
        times, running, waiting, labels=("running", "waiting in engines"), colors=("#4c78a8", "#eeca3b")
    )
    axis.axhline(generation["capacity"], color="black", linewidth=0.8, linestyle="--", label="places")
    axis.set_ylabel("sequences in flight")
    axis.legend(loc="upper right", fontsize=8)


def _lanes(axis: Any, outcome: Outcome, window: tuple[float, float]) -> list[str]:
    """Draw a lane for each engine and one for the ranks; return the methods that the ranks ran."""
    ticks, shown = [], []
    for number, (engine, agent) in enumerate(
        zip(outcome.cluster.engines, outcome.cluster.agents, strict=True)
    ):
        axis.broken_barh(_bars(engine.record.busy, window), (number + 0.15, 0.7), color=_ENGINE)
        updates = [(begin, end) for begin, end, _ in agent.updates]
        axis.broken_barh(_bars(updates, window), (number + 0.15, 0.7), color=_UPDATE)
        ticks.append(engine.name.rsplit("-", 2)[-2] + " " + engine.name.rsplit("-", 1)[-1])
    lane = len(ticks)
    for method, begin, end in outcome.cluster.record.rounds:
        bars = _bars([(begin, end)], window)
        if bars:
            axis.broken_barh(bars, (lane + 0.15, 1.7), color=_COLOURS.get(method, _OTHER))
            if method not in shown:
                shown.append(method)
    axis.set_yticks([*(i + 0.5 for i in range(lane)), lane + 1.0], [*ticks, "ranks"])
    axis.set_ylim(0, lane + 2)
    axis.invert_yaxis()
    return shown


def _bars(intervals: list[tuple[float, float]], window: tuple[float, float]) -> list[tuple[float, float]]:
    """Return (begin, length) of the intervals inside the window; neighbours are joined."""
    joined: list[list[float]] = []
    for begin, end in sorted(intervals):
        if end <= window[0] or begin >= window[1] or end <= begin:
            continue
        if joined and begin - joined[-1][1] < 1e-9:
            joined[-1][1] = end
        else:
            joined.append([begin, end])
    return [(begin, end - begin) for begin, end in joined]
