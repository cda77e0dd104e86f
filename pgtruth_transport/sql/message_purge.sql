-- Called by: transport.messages.purge. What a consumer holds stays with it.
-- Locks: the queue's messages that nobody holds.
-- Index: messages_fetch, by its first column.
DELETE FROM {schema}.messages
WHERE queue = %(queue)s AND (lease_expires_at IS NULL OR lease_expires_at < clock_timestamp())
