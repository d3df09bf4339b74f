{{/* Name of the Lease: operators that watch the same namespaces share it, other ones do not. */}}
{{- define "grpo.lease" -}}
{{- $watched := include "grpo.namespaces" . | fromJsonArray -}}
grpo-operator-{{ if $watched }}{{ $watched | join "," | sha256sum | trunc 8 }}{{ else }}all{{ end }}
{{- end }}
{{/* Permissions of the operator in each watched namespace. */}}
{{- define "grpo.namespacedRules" }}
  # Its own kinds. delete is for ttlSecondsAfterFinished, patch for annotations and finalizers.
  - apiGroups: [rl.grpo.dev]
    resources: [grpojobs]
    verbs: [get, list, watch, patch, delete]
  - apiGroups: [rl.grpo.dev]
    resources: [rolloutpools]
    verbs: [get, list, watch, create, patch]
  - apiGroups: [rl.grpo.dev]
    resources: [grpojobs/status, rolloutpools/status]
    verbs: [patch]
  # Setting blockOwnerDeletion on children needs this where OwnerReferencesPermissionEnforcement is on.
  - apiGroups: [rl.grpo.dev]
    resources: [grpojobs/finalizers, rolloutpools/finalizers]
    verbs: [update]
  # Children. The garbage collector deletes them; the operator itself deletes RayClusters and pods only.
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
  # The master key of a namespace's pods, and the epochs of their keys; no other Secret can be read or changed.
  - apiGroups: [""]
    resources: [secrets]
    resourceNames: [grpo-agents, grpo-agents-epoch]
    verbs: [get]
  - apiGroups: [""]
    resources: [secrets]
    resourceNames: [grpo-agents-epoch]
    verbs: [patch]
  # These two, and a Secret with the key of each job and pool.
  - apiGroups: [""]
    resources: [secrets]
    verbs: [create]
  # State of pods. delete is for pods on nodes that match scheduling.unhealthyNodes or have sick GPUs, create for
  # the pod that removes the folder of a deleted job (checkpoint.deletionPolicy).
  - apiGroups: [""]
    resources: [pods]
    verbs: [list, watch, create, delete]
  - apiGroups: [""]
    resources: [events]
    verbs: [create]
{{- end }}
