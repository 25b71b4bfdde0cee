-- Concurrency keys, and the notifications of a changed row. LANE is the concurrency key of a row; a key and a tenant
-- make a group. The live runs of a group with HELD 0 are its active runs.

local function is_of(row, group)
  return row[LANE] ~= null and group_of(row) == group
end

local function is_head(row, group)
  return LIVE[row[STATUS]] and row[HELD] == 0 and is_of(row, group)
end

-- Returns the active runs of a group by arrival, with the changes of this commit, ignoring the row `except`.
local function heads_of(group, except)
  for _, run in ipairs(call('ZRANGE', P .. 'lane:' .. group, 0, -1)) do get(run) end
  local found = {}
  for _, known in pairs(tx.rows) do
    if known and known.row ~= except and is_head(known.row, group) then found[#found + 1] = known.row end
  end
  table.sort(found, function(a, b) return a[N] < b[N] end)
  return found
end


local function before(a, b)
  if a[PRIORITY] ~= b[PRIORITY] then return a[PRIORITY] > b[PRIORITY] end
  return a[N] < b[N]
end

local function first_behind(group)
  local first
  local key, from, there = P .. 'behind:' .. group, 0, nil
  repeat
    local page = call('ZRANGE', key, from, from + 7)
    for _, member in ipairs(page) do there = named(key, member, string.sub(member, 18)) or there end
    from = from + 8
  until there or #page < 8
  for _, known in pairs(tx.rows) do
    local row = known and known.row
    if row and is_of(row, group) and row[STATUS] == 'pending' and row[HELD] == BEHIND and row[DUE_AT] == '0'
      and (not first or before(row, first)) then
      first = row
    end
  end
  return first
end

-- Returns whether a new row of a group must wait, for active runs or for runs that come first.
local function is_blocked(row)
  if #heads_of(group_of(row), row) >= row[CONCURRENCY_LIMIT] then return true end
  local first = row[CONCURRENCY_LIMIT] > 1 and first_behind(group_of(row))
  return first and first ~= row and first[PRIORITY] >= row[PRIORITY]
end

-- Unblocks the next runs of a group, as long as fewer runs of it are active than they allow.
local function release(group)
  local active = #heads_of(group)
  local row = first_behind(group)
  while row and active < row[CONCURRENCY_LIMIT] do
    row[HELD] = 0
    changed(row)
    ring('work')
    active, row = active + 1, first_behind(group)
  end
end

-- Returns a pending row, blocked if its concurrency key requires it.
local function enter(row)
  if row[LANE] == null then return row end
  if row[ORIGIN] ~= '' then
    row[HELD] = ASIDE
  else
    row[HELD] = (row[DUE_AT] ~= '0' or is_blocked(row)) and BEHIND or 0
  end
  return row
end

-- Notifies listeners of a changed row, and unblocks the next runs of its concurrency key.
local function save(row)
  ring(LIVE[row[STATUS]] and 'work' or 'done')
  changed(row)
  if row[LANE] ~= null and (row[HELD] ~= 0 or not LIVE[row[STATUS]]) then release(group_of(row)) end
  return row
end

local function expect(run, statuses)
  local row = get(run)
  for _, status in ipairs(statuses) do
    if row and row[STATUS] == status then return row end
  end
  refuse('MOVED')
end
