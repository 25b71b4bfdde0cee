-- Rare operations are defined when the first one of them is called, so that other commits do not pay for them.
local lately = {
  __index = function(of, name)
    setmetatable(ops, nil)
    setmetatable(applied, nil)
    seldom()
    return of[name]
  end,
}
setmetatable(ops, lately)
setmetatable(applied, lately)

local function encoded(result)
  if type(result) == 'table' and result.raw then return result.raw end
  if result == null then return 'null' end
  return cjson.encode(result)
end

local function commit(asked)
  local key, token = asked[1], asked[2]
  begin()
  local superseded = key ~= null and fenced(key) ~= token
  tx.guard = key
  tx.superseded = superseded
  local answers = {}
  for i, op in ipairs(asked[3]) do
    local run = superseded and applied[op[1]] or not superseded and ops[op[1]]
    if not run then
      if superseded then not_applied() end
      error('there is no operation ' .. op[1])
    end
    answers[i] = encoded(run(unpack(op[2])))
  end
  if not superseded then finish() end
  return '[' .. table.concat(answers, ',') .. ']'
end

-- Returns the server's error if it accepts no writes at this time. It rejects the first write of a commit or none, so
-- nothing was written.
local function not_now(said)
  for _, word in ipairs({'READONLY', 'NOREPLICAS'}) do
    local at = string.find(said, word .. ' ', 1, true)
    if at and at < 40 then return string.sub(said, at) end
  end
end

local answers = {}
for i, asked in ipairs(cjson.decode(ARGV[2])) do
  local done, answer = pcall(commit, asked)
  if done then
    answers[i] = answer
  elseif type(answer) == 'table' and answer.refused then
    -- If the claim is superseded and not all of its writes were applied before, it is lost, whichever operation failed.
    answers[i] = '!' .. (tx.superseded and 'LOST ' .. asked[1] .. ' ' .. asked[2] or answer.refused)
  else
    local said = type(answer) == 'table' and answer.err or tostring(answer)
    if not_now(said) then return redis.error_reply(not_now(said)) end
    answers[i] = '!ERROR ' .. said
  end
end

for _, after in ipairs(afters) do pcall(after) end

-- The writes are applied and reported to the caller even if this notification fails.
for topic in pairs(rings) do redis.pcall('PUBLISH', P .. 'bell:' .. topic, '') end
return answers
