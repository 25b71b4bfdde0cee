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

-- Stores the state of a run of another store.
ops['state.copy'] = function(run, fields)
  for name, value in pairs(fields) do write('HSET', P .. 'state:' .. run, name, value) end
  return null
end

ops['state.row'] = function(run)
  return state(run)
end

-- The effects of a lineage are a hash: for each key and digest, [[run, row], ...] as JSON, one pair for each run. The
-- field "marks" has the marks of all keys that made digests of the lineage, so that only a caller that lacks one of them
-- has to look at all fields.
--
-- Callers pass the digests of an effect as {fields, prefixes, marks}: the names of the fields, how all fields of the same
-- effect begin, and the mark of the key of each digest, "" for a plain digest. An effect has a second key, which is a
-- digest of the first one: under that key a store has the effect of a run that was erased.

local MARKS, MEMBERS, CHILDREN = 'marks', '["",""]', '["","child"]'

local function lineage(origin)
  tx.effects = tx.effects or {}
  tx.effects[origin] = tx.effects[origin] or {}
  return tx.effects[origin]
end

local function effects(origin, field)
  local key, known = P .. 'effects:' .. origin, lineage(origin)
  if not known[field] then
    local stored = not known.deleted and call('HGET', key, field)
    fitting[key] = true
    known[field] = stored and cjson.decode(stored) or {}
  end
  return known[field]
end

local function write_effects(origin, field, rows)
  lineage(origin)[field] = rows
  if #rows > 0 then
    write('HSET', P .. 'effects:' .. origin, field, cjson.encode(rows))
  else
    write('HDEL', P .. 'effects:' .. origin, field)
  end
end

local function has(list, value)
  for _, each in ipairs(list) do
    if each == value then return true end
  end
  return false
end

-- Returns the fields with the rows of an effect. Digests that were made with another key than the keys of the caller cannot
-- be compared, so they count as the same.
local function same_effect(origin, digests)
  local fields, unknown = {unpack(digests[1])}, false
  for _, mark in ipairs(effects(origin, MARKS)) do unknown = unknown or not has(digests[3], mark) end
  if unknown then
    for _, field in ipairs(call('HKEYS', P .. 'effects:' .. origin)) do
      for _, prefix in ipairs(digests[2]) do
        local digest = field:sub(1, #prefix) == prefix and field:sub(#prefix + 1) or ''
        local mark = digest:match('^h%.[^.]*%.') or digest:match('^h%.')
        if mark and not has(digests[3], mark) then fields[#fields + 1] = field end
      end
    end
  end
  return fields
end

local function row_of(rows, run)
  for _, row in ipairs(rows) do
    if row[1] == run then return row[2] end
  end
end

-- Returns the row that the run has of an effect under one of these digests.
local function of_run(origin, digests, run)
  for _, field in ipairs(digests[1]) do
    local row = row_of(effects(origin, field), run)
    if row then return row end
  end
end

-- Replaces the row of that run by `row`, or removes it without `row`. Rows of other runs are kept.
local function keep_effect(origin, digests, run, row)
  for at, field in ipairs(digests[1]) do
    local kept, rows = {}, effects(origin, field)
    for _, each in ipairs(rows) do
      if each[1] ~= run then kept[#kept + 1] = each end
    end
    if row and at == 1 then kept[#kept + 1] = {run, row} end
    if #kept ~= #rows or (row and at == 1) then write_effects(origin, field, kept) end
  end
  local marks, mark = effects(origin, MARKS), digests[3][1]
  if row and mark ~= '' and not has(marks, mark) then
    write_effects(origin, MARKS, {mark, unpack(marks)})
  end
  return null
end

ops['effect.begin'] = function(origin, digests, run, row)
  if of_run(origin, digests, run) then return null end
  for _, field in ipairs(same_effect(origin, digests)) do
    for _, each in ipairs(effects(origin, field)) do
      if each[1] ~= run then refuse('EFFECT') end
    end
  end
  return keep_effect(origin, digests, run, row)
end

applied['effect.begin'] = function(origin, digests, run)
  if not of_run(origin, digests, run) then not_applied() end
  return null
end

ops['effect.put'] = keep_effect

applied['effect.put'] = function(origin, digests, run, row)
  if row_of(effects(origin, digests[1][1]), run) ~= row then not_applied() end
  return null
end

ops['effect.drop'] = function(origin, digests, run)
  return keep_effect(origin, digests, run)
end

applied['effect.drop'] = function(origin, digests, run)
  if of_run(origin, digests, run) then not_applied() end
  return null
end

-- Replaces the row of a run by the same one, encoded in another way, perhaps with another digest.
ops['effect.rewrite'] = function(origin, digests, run, old, now, new)
  if of_run(origin, digests, run) ~= old then return false end
  local moved = now[1][1] ~= digests[1][1]
  if moved then keep_effect(origin, digests, run) end
  if not moved or not of_run(origin, now, run) then keep_effect(origin, now, run, new) end
  return true
end

ops['effect.leave'] = function(origin, run)
  local leaving, at = {{origin, run}}, 1
  while leaving[at] do
    local left, member = unpack(leaving[at])
    keep_effect(left, {{MEMBERS}, {}, {''}}, member)
    if #effects(left, MEMBERS) == 0 then
      for _, child in ipairs(effects(left, CHILDREN)) do leaving[#leaving + 1] = {child[1], left} end
      write('DEL', P .. 'effects:' .. left)
      tx.effects[left] = {deleted = true}
    end
    at = at + 1
  end
  return null
end

ops['state.effect_keys'] = function(origin)
  local found = {}
  for _, field in ipairs(call('HKEYS', P .. 'effects:' .. origin)) do
    if field ~= MARKS then found[#found + 1] = field end
  end
  return found
end

ops['state.effects'] = function(origin, digests)
  local found = {}
  for _, field in ipairs(same_effect(origin, digests)) do
    for _, row in ipairs(effects(origin, field)) do found[#found + 1] = row[2] end
  end
  return found
end
