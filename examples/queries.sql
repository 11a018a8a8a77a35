-- Questions to a run, for DuckDB. From the folder that holds `run-tables`:
--
--     omnicache export run --to parquet -o run-tables
--     duckdb < queries.sql
--
-- docs/export.md explains the columns. The tests of the repository run every query.

CREATE VIEW engines AS FROM read_parquet('run-tables/engines/*.parquet');
CREATE VIEW steps AS FROM read_parquet('run-tables/steps/**/*.parquet', hive_partitioning = true);
CREATE VIEW requests AS FROM read_parquet('run-tables/requests/**/*.parquet', hive_partitioning = true);
CREATE VIEW request_steps AS FROM read_parquet('run-tables/request_steps/**/*.parquet', hive_partitioning = true);
CREATE VIEW rank_steps AS FROM read_parquet('run-tables/rank_steps/**/*.parquet', hive_partitioning = true);
CREATE VIEW evictions AS FROM read_parquet('run-tables/evictions/**/*.parquet', hive_partitioning = true);

-- name: totals
-- The totals of `omnicache show RUN --summary`.
SELECT
    count(*) AS steps,
    sum(num_scheduled_tokens) AS scheduled_tokens,
    sum(queried_tokens) AS queried_tokens,
    sum(hit_tokens) AS hit_tokens,
    round(100 * sum(hit_tokens) / sum(queried_tokens), 1) AS hit_rate_percent,
    sum(resumed_hit_tokens) AS resumed_hit_tokens,
    sum(evicted_blocks) AS evicted_blocks,
    sum(num_preempted) AS preemptions
FROM steps;

-- name: hit rate over time
-- Ten parts of the run of equal length, and what hit in each.
WITH span AS (SELECT min(start_unix_ns) AS first, max(start_unix_ns) AS last FROM steps)
SELECT
    least(9, (start_unix_ns - first) * 10 // greatest(1, last - first)) AS part,
    sum(queried_tokens) AS queried_tokens,
    sum(hit_tokens) AS hit_tokens,
    round(100 * sum(hit_tokens) / nullif(sum(queried_tokens), 0), 1) AS hit_rate_percent
FROM steps, span
GROUP BY part
ORDER BY part;

-- name: pool
-- How full the pool of each engine was after schedule().
SELECT
    engine,
    any_value(num_gpu_blocks) - 1 AS blocks,
    round(100 * avg(num_used_blocks) / (any_value(num_gpu_blocks) - 1), 2) AS mean_percent,
    round(100 * max(num_used_blocks) / (any_value(num_gpu_blocks) - 1), 2) AS peak_percent,
    arg_max(step, (num_used_blocks, -step)) AS peak_step
FROM steps JOIN engines USING (engine)
GROUP BY engine
ORDER BY engine;

-- name: phases
-- Where the time of a step goes: milliseconds, all steps.
SELECT
    phase,
    count(*) AS steps,
    round(sum(ns) / 1e6, 3) AS total_ms,
    round(quantile_cont(ns, 0.5) / 1e6, 3) AS p50_ms,
    round(quantile_cont(ns, 0.99) / 1e6, 3) AS p99_ms,
    round(max(ns) / 1e6, 3) AS max_ms
FROM (
    UNPIVOT steps
    ON schedule_ns, lookup_ns, allocate_ns, prepare_ns, forward_ns, sample_ns, output_ns, save_ns, restore_ns, copy_ns
    INTO NAME phase VALUE ns
)
GROUP BY phase
ORDER BY total_ms DESC;

-- name: slowest steps
-- The ten longest forward passes, and what was in them.
SELECT
    engine, step, round(forward_ns / 1e6, 2) AS forward_ms,
    num_requests, num_scheduled_tokens, num_prefill_tokens, num_preempted, evicted_blocks
FROM steps
ORDER BY forward_ns DESC NULLS LAST, engine, step
LIMIT 10;

-- name: requests
-- How long each request waited and ran, and what the cache gave it.
SELECT
    external_id,
    round((first_scheduled_unix_ns - arrival_unix_ns) / 1e6, 2) AS waited_ms,
    round((finished_unix_ns - first_scheduled_unix_ns) / 1e6, 2) AS ran_ms,
    num_prompt_tokens, hit_tokens, resumed_hit_tokens, num_preemptions, status
FROM requests
ORDER BY arrival_unix_ns, engine, request;

-- name: ranks
-- Who keeps the others waiting: how far the ranks of a step are apart.
SELECT
    rank,
    count(*) AS passes,
    round(avg(forward_ns) / 1e6, 3) AS mean_forward_ms,
    round(avg(forward_ns - fastest) / 1e6, 3) AS mean_behind_fastest_ms
FROM (SELECT *, min(forward_ns) OVER (PARTITION BY engine, step) AS fastest FROM rank_steps)
GROUP BY rank
ORDER BY rank;

-- name: evictions
-- Whose blocks made room for whom.
SELECT
    owner.external_id AS cached_by,
    taker.external_id AS taken_by,
    count(*) AS hashes,
    count(DISTINCT block_id) AS blocks
FROM evictions
LEFT JOIN requests AS owner ON owner.engine = evictions.engine AND owner.request = evictions.owner
LEFT JOIN requests AS taker ON taker.engine = evictions.engine AND taker.request = evictions.request
GROUP BY ALL
ORDER BY hashes DESC, cached_by, taken_by;

-- name: prefill and decode
-- Steps by what they did, and the tokens a second of the forward pass.
SELECT
    CASE WHEN num_prefill_tokens = 0 THEN 'decode'
         WHEN num_prefill_tokens = num_scheduled_tokens THEN 'prefill'
         ELSE 'mixed' END AS kind,
    count(*) AS steps,
    sum(num_scheduled_tokens) AS tokens,
    round(sum(num_scheduled_tokens) / (sum(forward_ns) / 1e9)) AS tokens_per_second
FROM steps
GROUP BY kind
ORDER BY kind;

-- name: growth
-- The longest contexts: tokens that were computed when a request was scheduled last.
SELECT engine, request, max(num_computed_tokens + num_scheduled_tokens) AS context_tokens
FROM request_steps
GROUP BY engine, request
ORDER BY context_tokens DESC, engine, request
LIMIT 10;
