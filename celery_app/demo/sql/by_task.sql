-- The demo's final table: jobs and times to a terminal state by task.
-- Locks nothing.
-- Reads the whole table, which is small here.
SELECT task,
       count(*) AS jobs,
       count(*) FILTER (WHERE status = 'done') AS done,
       count(*) FILTER (WHERE status = 'failed') AS failed,
       count(*) FILTER (WHERE status NOT IN ('done', 'failed')) AS open,
       percentile_cont(0.95) WITHIN GROUP (ORDER BY extract(epoch FROM updated_at - created_at))
           FILTER (WHERE status IN ('done', 'failed')) AS p95
FROM pgtruth.jobs
WHERE task NOT LIKE 'pgtruth.%%'
GROUP BY task
ORDER BY task;
