-- Called by: signals.notify, after the commit of jobs' ends that somebody waits for, and for its test of LISTEN.
-- Locks: the lock that the server takes for every NOTIFY at commit; held briefly, since nothing is written, or flushed.
-- Index: none.
SELECT pg_notify(%(channel)s, p.payload)
FROM unnest(%(payloads)s::text[]) AS p(payload)
