"""The panels of each dashboard.

The operator's series name a job by ``namespace`` and ``name``; those of pods by ``namespace`` and
``rl_grpo_dev_job``, which the PodMonitors take from the pods' labels.
"""

from grpo_devcluster.dashboards.grafana import Dashboard, Panel, Variable

_NAMESPACE = Variable("namespace", "Namespace", "label_values(grpo_job_info, namespace)")
_JOB = Variable("job", "Job", 'label_values(grpo_job_info{namespace=~"$namespace"}, name)')
_OWN = '{namespace=~"$namespace",name=~"$job"}'
_USED = '{namespace=~"$namespace",name=~"$job",use!~"idle|replayed"}'
_POD = 'namespace=~"$namespace",rl_grpo_dev_job=~"$job"'
_PODS = "{" + _POD + "}"
_RECOVERIES = f"grpo_recovery_seconds_bucket{_PODS}"
_NAME, _POD_JOB = "{{namespace}}/{{name}}", "{{namespace}}/{{rl_grpo_dev_job}}"


def _rate(metric: str, labels: str = _PODS) -> str:
    return f"rate({metric}{labels}[$__rate_interval])"


def _metric(names: str) -> str:
    return f'grpo_metric{{{_POD},name=~"{names}"}}'


_OPERATOR = Dashboard(
    "grpo-operator",
    "GRPO / Operator",
    (),
    (
        Panel(
            "Jobs by phase",
            "All jobs that the operator sees.",
            "count by (phase) (grpo_job_info)",
            "{{phase}}",
        ),
        Panel(
            "Reconciles",
            "By kind of object and result; errors are repeated with a back-off.",
            f"sum by (kind, result) ({_rate('grpo_reconciles_total', '')})",
            "{{kind}}, {{result}}",
            "ops",
        ),
        Panel(
            "Reconcile, 99 of 100 within",
            "Duration of a reconcile.",
            f"histogram_quantile(0.99, sum by (le, kind) ({_rate('grpo_reconcile_seconds_bucket', '')}))",
            "{{kind}}",
            "s",
        ),
        Panel(
            "Writes to the API server",
            "By verb and status code of the answer.",
            f"sum by (verb, code) ({_rate('grpo_api_requests_total', '')})",
            "{{verb}} {{code}}",
            "ops",
        ),
        Panel(
            "Age of the loop",
            "Seconds since its last pass: an alert is raised above 120.",
            "max by (pod) (grpo_loop_age_seconds)",
            "{{pod}}",
            "s",
        ),
        Panel(
            "Age of the cache",
            "Seconds since an event of a watch, or since a listing that agreed.",
            "max by (kind) (grpo_cache_age_seconds)",
            "{{kind}}",
            "s",
        ),
    ),
)

_JOBS = Dashboard(
    "grpo-job",
    "GRPO / Job",
    (_NAMESPACE, _JOB),
    (
        Panel("Steps", "Finished steps.", f"grpo_job_step{_OWN}", _NAME),
        Panel("Mean reward", "Of the samples of the last step.", f"grpo_job_reward_mean{_OWN}", _NAME),
        Panel(
            "Seconds of a step",
            "By phase; phases may overlap.",
            _metric("timing_s/(gen|old_log_prob|ref|update_actor|update_weights|save_checkpoint|reward)"),
            "{{rl_grpo_dev_job}} {{name}}",
            "s",
        ),
        Panel(
            "Tokens per second and trainer GPU",
            "Prompt and response tokens of the last step.",
            f"grpo_job_tokens_per_second_per_gpu{_OWN}",
            _NAME,
        ),
        Panel(
            "Loss and gradient norm",
            "Of the last update.",
            _metric("actor/(loss|grad_norm)"),
            "{{rl_grpo_dev_job}} {{name}}",
        ),
        Panel(
            "Divergence",
            "From the reference policy, and between trainer and engines.",
            _metric("actor/(kl_loss|ppo_kl)|train/train_rollout_logprob_abs_diff"),
            "{{rl_grpo_dev_job}} {{name}}",
        ),
        Panel(
            "Response length",
            "Tokens.",
            _metric("response_length/(mean|max)"),
            "{{rl_grpo_dev_job}} {{name}}",
        ),
        Panel(
            "Steps since the last checkpoint",
            "Those that a loss of all pods would repeat.",
            f"grpo_job_step{_OWN} - on (namespace, name) grpo_job_checkpoint_step{_OWN}",
            _NAME,
        ),
        Panel(
            "Age of the last checkpoint",
            "While the job has pods: the time that a loss of all of them would repeat, at most.",
            f"max by (namespace, name) (grpo_job_checkpoint_age_seconds{_OWN})",
            _NAME,
            "s",
        ),
        Panel(
            "Time without progress",
            "In the phase, or since the last step; an alert is raised above its limit.",
            f"max by (namespace, name, phase) (grpo_job_phase_seconds{_OWN})",
            _NAME + " {{phase}}",
            "s",
        ),
        Panel(
            "Steps since the last copy in memory",
            "Those that a loss of one pod would repeat; for jobs with checkpoint.memory.",
            f"grpo_job_step{_OWN} - on (namespace, name) grpo_job_memory_copy_step{_OWN}",
            _NAME,
        ),
        Panel(
            "Copies in memory that failed",
            "Since the last one that was complete in all of its pods.",
            f"max by (namespace, name) (grpo_job_memory_copy_failures{_OWN})",
            _NAME,
        ),
    ),
)

_ENGINES = Dashboard(
    "grpo-engines",
    "GRPO / Engines and GPUs",
    (_NAMESPACE, _JOB),
    (
        Panel(
            "Samples on engines and waiting",
            "Those that wait have no free engine.",
            f"sum by (namespace, rl_grpo_dev_job) (grpo_rollout_in_flight{_PODS})",
            _POD_JOB,
        ),
        Panel(
            "Samples that wait",
            "For room on an engine.",
            f"sum by (namespace, rl_grpo_dev_job) (grpo_rollout_queued{_PODS})",
            _POD_JOB,
        ),
        Panel(
            "Tokens per second",
            "Received from all engines of a job.",
            f"sum by (namespace, rl_grpo_dev_job) ({_rate('grpo_rollout_tokens_total')})",
            _POD_JOB,
        ),
        Panel(
            "Interrupted samples",
            "Continued on another engine, per second.",
            f"sum by (namespace, rl_grpo_dev_job) ({_rate('grpo_rollout_continued_total')})",
            _POD_JOB,
            "ops",
        ),
        Panel(
            "GPU utilization",
            "Mean of a job's GPUs, engines and trainers.",
            f"avg by (namespace, rl_grpo_dev_job) (grpo_gpu_utilization_ratio{_PODS})",
            _POD_JOB,
            "percentunit",
        ),
        Panel(
            "GPUs that are not healthy",
            "1: degraded, 2: sick.",
            f"max by (gpu) (grpo_gpu_health{_PODS}) > 0",
            "{{gpu}}",
        ),
    ),
)

_WEIGHTS = Dashboard(
    "grpo-weights",
    "GRPO / Weight updates",
    (_NAMESPACE, _JOB),
    (
        Panel("Version of each engine", "-1: it serves none.", f"grpo_weight_version{_PODS}", "{{pod}}"),
        Panel(
            "Versions behind",
            "The slowest engine of a job.",
            f"grpo_job_weight_version_lag{_OWN}",
            _NAME,
        ),
        Panel(
            "Seconds of an update",
            "By part, of a job's slowest engine, per second of time.",
            f"max by (rl_grpo_dev_job, part) ({_rate('grpo_weight_update_seconds_total')})",
            "{{rl_grpo_dev_job}} {{part}}",
            "s",
            stacked=True,
        ),
        Panel(
            "Bytes of updates",
            "That engines have committed, per second.",
            f"sum by (namespace, rl_grpo_dev_job) ({_rate('grpo_weight_update_bytes_total')})",
            _POD_JOB,
            "Bps",
        ),
        Panel(
            "Phases entered",
            "An update that ends well is not among `aborted`.",
            f"sum by (phase) ({_rate('grpo_weight_update_phases_total')})",
            "{{phase}}",
            "ops",
        ),
        Panel(
            "Links that failed",
            "Since the last start of the ranks; versions went through host memory.",
            _metric("weight_sync/link_failures"),
            _POD_JOB,
        ),
    ),
)

_GOODPUT = Dashboard(
    "grpo-goodput",
    "GRPO / Goodput",
    (_NAMESPACE, _JOB),
    (
        Panel(
            "Use of the GPUs",
            "GPUs by what they do.",
            f"sum by (use) ({_rate('grpo_job_gpu_seconds_total', _OWN)})",
            "{{use}}",
            stacked=True,
        ),
        Panel(
            "Share that is not lost",
            "Neither idle nor repeating steps.",
            "sum by (namespace, name) ("
            + _rate("grpo_job_gpu_seconds_total", _USED)
            + f") / sum by (namespace, name) ({_rate('grpo_job_gpu_seconds_total', _OWN)})",
            _NAME,
            "percentunit",
        ),
        Panel(
            "Lost GPU time by cause",
            "GPUs that are idle or repeat steps.",
            f"sum by (cause) ({_rate('grpo_job_lost_gpu_seconds_total', _OWN)})",
            "{{cause}}",
            stacked=True,
        ),
        Panel(
            "Restarts in an hour",
            "By cause.",
            f"increase(grpo_job_restarts_total{_OWN}[1h])",
            _NAME + " {{cause}}",
        ),
        Panel(
            "Recovery, 9 of 10 within",
            "From the fault to the end of the interrupted step, in six hours.",
            f"histogram_quantile(0.9, sum by (le, cause) (increase({_RECOVERIES}[6h])))",
            "{{cause}}",
            "s",
        ),
        Panel(
            "Times parked",
            "Waits for engines, reward or store, with ranks alive.",
            f"grpo_job_times_parked{_OWN}",
            _NAME,
        ),
    ),
)

DASHBOARDS = (_OPERATOR, _JOBS, _ENGINES, _WEIGHTS, _GOODPUT)
