-- What long answers share: each ends after so much text, however few things that are, and says where to go on from.

local ENOUGH = 1000000  -- characters
local AT_ONCE = 32  -- things that are read before their length is known, at most

-- Calls see(thing) with the things that more(last, count) gives, one by one; it tells their length. Ends with enough
-- text, or `limit` things: then it returns the last one seen, behind which there may be more, and else nothing.
local function through(limit, more, see)
  local size, count, left, last = 0, 1, limit, nil
  while left > 0 do
    local asked = math.min(count, left)
    local page = more(last, asked)
    for _, thing in ipairs(page) do
      size, last, left = size + see(thing), thing, left - 1
      if size >= ENOUGH then return last end
    end
    if #page < asked then return nil end
    count = math.min(2 * count, AT_ONCE)
  end
  return last
end
