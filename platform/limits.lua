-- What the scripts of limits share, put before each of them: Redis's own clock, the windows of a
-- moment, and the keys of a bucket (a tenant, one of its keys, or an adapter that it uses).
--
-- A bucket's keys:  <bucket>:leases          ids of running requests, scored by their lease's end
--                   <bucket>:requests        GCRA's theoretical arrival time
--                   <bucket>:minute:29812    tokens of a period
--                   <bucket>:day:2026-11-30  tokens of a UTC day
--                   <bucket>:month:2026-11   tokens of a UTC month
-- A request's:      <tenant>:reserved:<id>   what it reserved and where
-- A tenant's:       <tenant>:since           when its requests began to be counted
--                   <tenant>:ledger          tokens of earlier ones, by <bucket>:<window>
-- All times are microseconds.

local DAY = 86400000000
local RECORD_KEPT = '604800000' -- 7 days in ms, where no server is left to sweep it
local SWEPT_KEPT = 3600 * 1000

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

-- The date of a day, counted since the epoch.
-- H. Hinnant, "chrono-Compatible Low-Level Date Algorithms", civil_from_days.
local function civil(days)
  local shifted = days + 719468
  local era = math.floor(shifted / 146097)
  local doe = shifted - era * 146097
  local leaps = math.floor(doe / 1460) - math.floor(doe / 36524) + math.floor(doe / 146096)
  local yoe = math.floor((doe - leaps) / 365)
  local doy = doe - (365 * yoe + math.floor(yoe / 4) - math.floor(yoe / 100))
  local mp = math.floor((5 * doy + 2) / 153)
  local month = mp < 10 and mp + 3 or mp - 9
  local year = yoe + era * 400 + (month <= 2 and 1 or 0)
  return year, month, doy - math.floor((153 * mp + 2) / 5) + 1
end

local function days_in(year, month)
  if month == 2 then
    local leap = year % 4 == 0 and (year % 100 ~= 0 or year % 400 == 0)
    return leap and 29 or 28
  end
  return (month == 4 or month == 6 or month == 9 or month == 11) and 30 or 31
end

-- The UTC day and month of a moment: the last part of their counters' names, and their ends.
local function dates(moment)
  local today = math.floor(moment / DAY)
  local year, month, day = civil(today)
  local names = {
    string.format('day:%04d-%02d-%02d', year, month, day),
    string.format('month:%04d-%02d', year, month),
  }
  return names, {(today + 1) * DAY, (today + days_in(year, month) - day + 1) * DAY}
end

-- The same of now, after its minute's.
local function windows(period)
  local minute, names, ends = math.floor(now / period), dates(now)
  table.insert(names, 1, string.format('minute:%.0f', minute))
  table.insert(ends, 1, (minute + 1) * period)
  return names, ends
end

-- A whole number as Redis takes it; it would write numbers itself, as slowly as fractions.
local function whole(number)
  return string.format('%.0f', number)
end

local function record_of(id)
  return KEYS[1] .. ':reserved:' .. id
end

-- What the index of all open requests calls this one.
local function member_of(id)
  return KEYS[1] .. ' ' .. id
end
