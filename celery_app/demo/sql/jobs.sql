-- The demo's verdict: each job with what its attempts say; victims are the workers that the story froze or killed.
-- Locks nothing.
-- Reads both tables, which are small here.
SELECT j.id, j.status,
       count(a.job_id) AS attempts,
       count(a.job_id) FILTER (WHERE a.outcome IN ('done', 'failed', 'cancelled')) AS ends,
       count(a.job_id) FILTER (WHERE a.outcome = 'lease_expired') AS expired,
       count(a.job_id) FILTER (
           WHERE a.outcome = 'lease_expired' AND split_part(a.owned_by, '@', 1) <> ALL(%(victims)s)
       ) AS taken_from_the_living
FROM pgtruth.jobs AS j
LEFT JOIN pgtruth.attempts AS a ON a.job_id = j.id
WHERE j.task NOT LIKE 'pgtruth.%%'
GROUP BY j.id, j.status;
