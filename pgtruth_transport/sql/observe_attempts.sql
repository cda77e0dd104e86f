-- Called by: observe.queries.attempts: how attempts ended, in the rows that are kept.
-- Locks: nothing. Reads at most the limit of rows, in no order: with more rows than that it is a sample.
-- Index: none (a scan that stops at the limit).
SELECT a.outcome, count(*)
FROM (SELECT outcome FROM {schema}.attempts LIMIT %(limit)s) a
GROUP BY a.outcome
ORDER BY a.outcome
