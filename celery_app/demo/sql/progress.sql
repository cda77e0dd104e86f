-- The demo's progress line: how many jobs there are and how many have ended.
-- Locks nothing.
-- Reads the whole table, which is small here.
SELECT count(*), count(*) FILTER (WHERE status IN ('done', 'failed'))
FROM pgtruth.jobs
WHERE task NOT LIKE 'pgtruth.%%';
