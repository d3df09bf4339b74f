"""Report of a rehearsal for people."""

from typing import Any

_GB, _TB = 1e9, 1e12


def as_text(figures: dict[str, Any]) -> str:
    """Return the figures of ``summary`` as text."""
    seconds, generation, idle = figures["seconds"], figures["generation"], figures["idle_share"]
    lines = [
        f"GRPOJob {figures['job']}, scenario {figures['scenario']['name']}: {figures['phase']} "
        f"({figures['message']})",
        f"layout          {figures['layout']}",
        f"start           {seconds['until_training']:.0f} s until the first prompt",
    ]
    for number, phases in enumerate(figures["steps"], 1):
        parts = ", ".join(
            f"{name} {phases[name]:.1f}"
            for name in ("gen", "reward", "old_log_prob", "ref", "update_actor", "update_weights")
            if name in phases
        )
        lines.append(f"step {number:<10} {phases['step']:.1f} s: {parts}")
    lines += [
        f"in flight       {_in_flight(generation)}; {generation['responses']} responses of "
        f"{generation['response_mean']:.0f} tokens",
        f"idle            engines {idle['rollout']:.0%}, trainers {idle['trainer']:.0%} of the steps",
        f"controller      {figures['memory']['controller_peak_rss'] / 2**30:.1f} GiB with the stand-ins, "
        f"{sum(figures['controller_cpu']['by_thread'].values()):.0f} s of CPU",
        _agents(figures["memory"]["engine_agent"]),
        "links           "
        + ", ".join(f"{link} {size / _GB:.2f} GB" for link, size in figures["links"].items()),
        "deadlines       limit, longest wait, margin",
    ]
    for entry in figures["deadlines"]:
        margin = "" if entry["margin"] is None else f"{entry['margin']:.1f} x"
        margin += " at least" if entry["upper_bound"] and margin else ""
        lines.append(f"  {entry['what']:<62}{entry['limit']:>7.0f} s{entry['seconds']:>9.1f} s  {margin}")
    if figures["hang_named_seconds"] is not None:
        lines.append(f"hang            named {figures['hang_named_seconds']:.0f} s after the limit")
    lines += _checkpoints(figures["checkpoints"])
    for lost in ("lost_node_recovery_seconds", "lost_head_recovery_seconds"):
        if figures[lost] is not None:
            lines.append(f"recovery        {figures[lost]:.0f} s after the loss")
    lines += [f"{when:>9.0f} s     {what}" for when, what in figures["events"]]
    return "\n".join(lines)


def _in_flight(generation: dict[str, Any]) -> str:
    """Return how full the engines were. A step with a place for each sample does not fill them."""
    share, places = generation["in_flight_share"], generation["capacity"]
    if share is None:
        return f"at most {generation['most_running']} of {places} places, one for each sample"
    return f"{share:.0%} of {places} places while more samples remain"


def _checkpoints(checkpoints: dict[str, Any]) -> list[str]:
    restores = [
        f"restore         {load['bytes'] / _TB:.2f} TB read in {load['seconds']:.0f} s"
        for load in checkpoints["loads"]
    ]
    return [*map(_save, checkpoints["saves"]), *restores]


def _save(save: dict[str, Any]) -> str:
    complete = "never" if save["complete"] is None else f"after {save['complete']:.0f} s"
    return (
        f"checkpoint      step {save['step']}: {save['bytes'] / _TB:.2f} TB; the step waits "
        f"{save['waited']:.0f} s; written after {save['written']:.0f} s, complete {complete}"
    )


def _agents(memory: dict[str, Any]) -> str:
    planned, measured = memory["planned"], memory["measured_rss"]
    text = f"agents          {planned / 2**20:.0f} MiB planned" if planned else "agents          not planned"
    return text + (f"; {measured / 2**20:.0f} MiB measured: {memory['measured_with']}" if measured else "")
