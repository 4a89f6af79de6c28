-- Takes back from a node that hangs what it has not answered, so that HAProxy repeats it elsewhere. Loaded by haproxy.cfg.
--
-- `on-marked-down shutdown-sessions` does the same at the moment at which a node is marked down, and then breaks, without
-- a repeat, requests for which it is just connecting to that node. 0.7 s later there are none: nothing new goes to a
-- node that is down, and `timeout connect` (0.5 s) has ended what went before.
local WAIT_MS, LOOK_MS = 700, 100
local down_ms = {}

core.register_task(function()
    while true do
        core.msleep(LOOK_MS)
        for name, server in pairs(core.backends["vecd"].servers) do
            if server:get_stats()["status"]:find("^DOWN") then
                down_ms[name] = (down_ms[name] or 0) + LOOK_MS
                if down_ms[name] == WAIT_MS then
                    server:shut_sess()
                end
            else
                down_ms[name] = nil
            end
        end
    end
end)
