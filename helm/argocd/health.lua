-- Health of GRPOJobs and RolloutPools for Argo CD: see docs/guides/gitops.md.
local conditions = {}
for _, condition in ipairs((obj.status or {}).conditions or {}) do
  conditions[condition.type] = condition
end

-- A condition that is true, for the spec as it is now.
local function holds(kind)
  local condition = conditions[kind]
  local current = condition ~= nil and condition.observedGeneration == obj.metadata.generation
  return current and condition.status == "True"
end

local function health(status, kind)
  local condition = conditions[kind]
  return {status = status, message = condition ~= nil and condition.message or ""}
end

if holds("Stalled") or holds("Failed") then
  return health("Degraded", holds("Stalled") and "Stalled" or "Failed")
elseif holds("Suspended") then
  return health("Suspended", "Suspended")
elseif holds("Ready") then
  return health("Healthy", "Ready")
end
return health("Progressing", "Ready")
