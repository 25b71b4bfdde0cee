-- Lanes: of the live runs of one, at most one, its head, has HELD 0. And what a change of a row brings with it.

local function is_head(row, lane)
  return row[LANE] == lane and LIVE[row[STATUS]] and row[HELD] == 0
end

-- The head of a lane, as this commit leaves it; not the row `except`.
local function head_of(lane, except)
  for _, run in ipairs(call('ZRANGE', P .. 'lane:' .. lane, 0, -1)) do get(run) end
  for _, known in pairs(tx.rows) do
    if known and known.row ~= except and is_head(known.row, lane) then return known.row end
  end
end

local function before(a, b)
  if a[PRIORITY] ~= b[PRIORITY] then return a[PRIORITY] > b[PRIORITY] end
  return a[N] < b[N]
end

local function first_behind(lane)
  local first
  local key, from, there = P .. 'behind:' .. lane, 0, nil
  repeat
    local page = call('ZRANGE', key, from, from + 7)
    for _, member in ipairs(page) do there = named(key, member, string.sub(member, 18)) or there end
    from = from + 8
  until there or #page < 8
  for _, known in pairs(tx.rows) do
    local row = known and known.row
    if row and row[LANE] == lane and row[STATUS] == 'pending' and row[HELD] == BEHIND and row[DUE_AT] == '0'
      and (not first or before(row, first)) then
      first = row
    end
  end
  return first
end

-- Lets the next run of a lane go, if no other has it.
local function release(lane)
  if head_of(lane) then return end
  local row = first_behind(lane)
  if row then
    row[HELD] = 0
    changed(row)
    ring('work')
  end
end

-- A pending row as it comes into its lane.
local function enter(row)
  if row[LANE] == null then return row end
  if row[ORIGIN] ~= '' then
    row[HELD] = ASIDE
  else
    row[HELD] = (row[DUE_AT] ~= '0' or head_of(row[LANE], row)) and BEHIND or 0
  end
  return row
end

-- Rings for a row that was changed, and lets the next one of its lane go.
local function save(row)
  ring(LIVE[row[STATUS]] and 'work' or 'done')
  changed(row)
  if row[LANE] ~= null and (row[HELD] ~= 0 or not LIVE[row[STATUS]]) then release(row[LANE]) end
  return row
end

local function expect(run, statuses)
  local row = get(run)
  for _, status in ipairs(statuses) do
    if row and row[STATUS] == status then return row end
  end
  refuse('MOVED')
end
