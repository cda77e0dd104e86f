-- The demo's verdict: each job with its retries, and how many of its attempts ended it.
-- Locks nothing.
-- Reads both tables, which are small here.
SELECT j.id, j.status, j.retry_count,
       count(a.job_id) FILTER (WHERE a.outcome IN ('done', 'failed', 'cancelled')) AS ends,
       count(a.job_id) FILTER (WHERE a.outcome = 'lease_expired') AS expired
FROM pgtruth.jobs AS j
LEFT JOIN pgtruth.attempts AS a ON a.job_id = j.id
WHERE j.task NOT LIKE 'pgtruth.%%'
GROUP BY j.id, j.status, j.retry_count;
