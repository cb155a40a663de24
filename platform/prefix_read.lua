-- A tenant's totals, and for each replica how many blocks it has there and how many of a prefix.
--
-- KEYS[1]  prefix of the tenant's keys
-- ARGV     how many replicas, each one's name and life, then the prefix's blocks from its start
-- returns  {totals (name, amount, …), {blocks of each}, {of the prefix, for each}}

local replicas = tonumber(ARGV[1])
local resident, longest = {}, {}
for i = 1, replicas do
  local name, life = ARGV[2 * i], ARGV[2 * i + 1]
  local blocks = KEYS[1] .. ':blocks:' .. name
  resident[i], longest[i] = 0, 0
  if redis.call('HGET', KEYS[1] .. ':last:' .. name, 'life') == life then
    resident[i] = redis.call('SCARD', blocks)
    for j = 2 * replicas + 2, #ARGV do
      if redis.call('SISMEMBER', blocks, ARGV[j]) == 0 then
        break
      end
      longest[i] = longest[i] + 1
    end
  end
end
return {redis.call('HGETALL', KEYS[1] .. ':totals'), resident, longest}
