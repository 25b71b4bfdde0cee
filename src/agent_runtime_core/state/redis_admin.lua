-- Reads of a run's state, and its deletion.

local function state(run)
  return call('HMGET', P .. 'state:' .. run, 'status', 'checkpoint', 'mark', 't')
end

applied['state.checkpoint'] = function(run, checkpoint, mark, t)
  local there = state(run)
  if there[2] ~= checkpoint or (there[3] or null) ~= mark or there[4] ~= t then not_applied() end
  return null
end

applied['state.status'] = function(run, status, t)
  local there = state(run)
  if there[1] ~= status or there[4] ~= t then not_applied() end
  return null
end

ops['state.delete'] = function(run)
  write('DEL', P .. 'state:' .. run)
  delete_journal(run)
  return null
end

ops['state.rewrite'] = function(run, old, new)
  local key = P .. 'state:' .. run
  if call('HGET', key, 'checkpoint') ~= old then return false end
  write('HSET', key, 'checkpoint', new)
  return true
end

ops['state.row'] = function(run)
  return state(run)
end

-- The effects of a lineage are a hash: for each key and digest, [[run, row], ...] as JSON, one pair for each run.

local MEMBERS = '["",""]'

local function effects(origin, what)
  local key, at = P .. 'effects:' .. origin, origin .. what
  tx.effects = tx.effects or {}
  if not tx.effects[at] then
    local stored = call('HGET', key, what)
    fitting[key] = true
    tx.effects[at] = stored and cjson.decode(stored) or {}
  end
  return tx.effects[at]
end

local function of_run(rows, run)
  for _, row in ipairs(rows) do
    if row[1] == run then return row[2] end
  end
end

-- Replaces the row of that run by `row`, or removes it without `row`. Rows of other runs are kept.
local function keep_effect(origin, what, run, row)
  local kept = {}
  for _, each in ipairs(effects(origin, what)) do
    if each[1] ~= run then kept[#kept + 1] = each end
  end
  if row then kept[#kept + 1] = {run, row} end
  tx.effects[origin .. what] = kept
  if #kept > 0 then
    write('HSET', P .. 'effects:' .. origin, what, cjson.encode(kept))
  else
    write('HDEL', P .. 'effects:' .. origin, what)
  end
  return null
end

ops['effect.begin'] = function(origin, what, run, row)
  local there = effects(origin, what)
  if of_run(there, run) then return null end
  if #there > 0 then refuse('EFFECT') end
  return keep_effect(origin, what, run, row)
end

applied['effect.begin'] = function(origin, what, run)
  if not of_run(effects(origin, what), run) then not_applied() end
  return null
end

ops['effect.put'] = keep_effect

applied['effect.put'] = function(origin, what, run, row)
  if of_run(effects(origin, what), run) ~= row then not_applied() end
  return null
end

ops['effect.drop'] = keep_effect

applied['effect.drop'] = function(origin, what, run)
  if of_run(effects(origin, what), run) then not_applied() end
  return null
end

-- Replaces the row of a run by the same one, encoded in another way, perhaps with another digest.
ops['effect.rewrite'] = function(origin, what, run, old, now_what, new)
  if of_run(effects(origin, what), run) ~= old then return false end
  keep_effect(origin, what, run, now_what == what and new or nil)
  if now_what ~= what and not of_run(effects(origin, now_what), run) then
    keep_effect(origin, now_what, run, new)
  end
  return true
end

ops['effect.leave'] = function(origin, run)
  keep_effect(origin, MEMBERS, run)
  if #effects(origin, MEMBERS) == 0 then
    write('DEL', P .. 'effects:' .. origin)
    tx.effects = nil
  end
  return null
end

ops['state.effect_keys'] = function(origin)
  return call('HKEYS', P .. 'effects:' .. origin)
end

ops['state.effects'] = function(origin, what)
  local found = {}
  for i, row in ipairs(effects(origin, what)) do found[i] = row[2] end
  return found
end
