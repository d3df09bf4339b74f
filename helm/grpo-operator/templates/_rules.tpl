{{/* What the operator may do inside a namespace that it watches. */}}
{{- define "grpo.namespacedRules" }}
  # Its own kinds. Delete: ttlSecondsAfterFinished.
  - apiGroups: [rl.grpo.dev]
    resources: [grpojobs]
    verbs: [get, list, watch, delete]
  - apiGroups: [rl.grpo.dev]
    resources: [rolloutpools]
    verbs: [get, list, watch, create, patch]
  - apiGroups: [rl.grpo.dev]
    resources: [grpojobs/status, rolloutpools/status]
    verbs: [patch]
  # Finalizers: setting blockOwnerDeletion on children needs this where it is enforced.
  - apiGroups: [rl.grpo.dev]
    resources: [grpojobs/finalizers, rolloutpools/finalizers]
    verbs: [update]
  # Children. Deleting them is the garbage collector's work, but for cleanupPolicy: All.
  - apiGroups: [ray.io]
    resources: [rayclusters]
    verbs: [get, list, watch, create, patch, delete]
  - apiGroups: [""]
    resources: [configmaps, services]
    verbs: [get, list, watch, create, patch]
  - apiGroups: [policy]
    resources: [poddisruptionbudgets]
    verbs: [get, list, watch, create, patch]
  - apiGroups: [networking.k8s.io]
    resources: [networkpolicies]
    verbs: [get, list, watch, create, patch]
  # State of pods. Delete: pods on nodes that scheduling.unhealthyNodes calls sick.
  - apiGroups: [""]
    resources: [pods]
    verbs: [get, list, watch, delete]
  - apiGroups: [""]
    resources: [events]
    verbs: [create]
{{- end }}
