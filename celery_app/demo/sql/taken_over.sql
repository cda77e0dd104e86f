-- The demo's wait for the sweep: which of these jobs lost an attempt to a lease that ran out.
-- Locks nothing.
-- Uses the primary key of attempts.
SELECT DISTINCT job_id
FROM pgtruth.attempts
WHERE job_id = ANY(%(ids)s) AND outcome = 'lease_expired';
