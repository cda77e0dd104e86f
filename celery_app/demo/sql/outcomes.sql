-- The demo's final table: how attempts ended.
-- Locks nothing.
-- Reads both tables, which are small here.
SELECT a.outcome, count(*)
FROM pgtruth.attempts AS a
JOIN pgtruth.jobs AS j ON j.id = a.job_id
WHERE j.task NOT LIKE 'pgtruth.%%'
GROUP BY a.outcome
ORDER BY count(*) DESC;
