-- Placed jobs: relays, GitLab servers and projects, API keys, jobs.
-- Times are Unix seconds; documents are the JSON of the types named.

ALTER TABLE tokens ADD COLUMN kind TEXT NOT NULL DEFAULT '';

CREATE TABLE relays (
    id          TEXT    NOT NULL PRIMARY KEY,
    key         BLOB    NOT NULL UNIQUE,           -- ed25519 public key
    name        TEXT    NOT NULL,
    enrolled_at INTEGER NOT NULL,
    server      TEXT    NOT NULL,                  -- URL it is bound to, '' = none yet
    reported_at INTEGER NOT NULL,
    seen_at     INTEGER NOT NULL,
    inventory   TEXT,                              -- dispatch.Inventory
    beat        TEXT,                              -- dispatch.Heartbeat
    states      TEXT    NOT NULL                   -- list of dispatch.RunnerState
) STRICT, WITHOUT ROWID;

CREATE TABLE relays_removed (
    id  TEXT    NOT NULL PRIMARY KEY,
    key BLOB    NOT NULL,
    at  INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE servers (
    url   TEXT    NOT NULL PRIMARY KEY,
    name  TEXT    NOT NULL,                        -- of the instance, '' = rejected
    at    INTEGER NOT NULL,
    actor TEXT    NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE projects (
    instance  TEXT    NOT NULL,
    id        INTEGER NOT NULL,
    path      TEXT    NOT NULL,
    state     TEXT    NOT NULL,                    -- approved, pending, rejected
    first_job INTEGER NOT NULL,
    first_ref TEXT    NOT NULL,
    refused   INTEGER NOT NULL,
    at        INTEGER NOT NULL,
    actor     TEXT    NOT NULL,
    PRIMARY KEY (instance, id)
) STRICT, WITHOUT ROWID;

CREATE TABLE keys (
    hash       TEXT    NOT NULL PRIMARY KEY,       -- sha256 of the key, hex
    name       TEXT    NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    revoked_at INTEGER NOT NULL,                   -- 0 = not revoked
    doc        TEXT    NOT NULL                    -- hub.Key
) STRICT, WITHOUT ROWID;

CREATE TABLE jobs (
    n            INTEGER PRIMARY KEY,              -- order of submission
    id           TEXT    NOT NULL UNIQUE,
    owner        TEXT    NOT NULL,
    state        TEXT    NOT NULL,
    outcome      TEXT    NOT NULL,                 -- '' = not ended, success, or the failure
    instance     TEXT    NOT NULL,
    project      TEXT    NOT NULL,                 -- its path
    ref          TEXT    NOT NULL,
    name         TEXT    NOT NULL,
    pool         TEXT    NOT NULL,
    node         TEXT    NOT NULL,
    image_key    TEXT    NOT NULL,
    submitted_at INTEGER NOT NULL,
    accepted_at  INTEGER NOT NULL,                 -- 0 = not, as the next two
    finished_at  INTEGER NOT NULL,
    settled_at   INTEGER NOT NULL,
    doc          TEXT    NOT NULL                  -- hub.Job
) STRICT;

CREATE INDEX jobs_unsettled ON jobs (n) WHERE settled_at = 0;
CREATE INDEX jobs_images ON jobs (image_key, node, finished_at) WHERE image_key <> '';

CREATE TABLE job_specs (
    n    INTEGER PRIMARY KEY,                      -- the job's
    dict INTEGER NOT NULL,                         -- 0 = none
    data BLOB    NOT NULL                          -- redacted, zstd
) STRICT;

CREATE TABLE dicts (
    id   INTEGER PRIMARY KEY,
    data BLOB    NOT NULL
) STRICT;

CREATE TABLE job_tails (
    n      INTEGER PRIMARY KEY,                    -- the job's
    failed INTEGER NOT NULL,
    kept   INTEGER NOT NULL,                       -- order of keeping, for the cache
    size   INTEGER NOT NULL,                       -- of the whole output
    start  INTEGER NOT NULL,                       -- offset of the first byte kept
    data   BLOB    NOT NULL                        -- zstd
) STRICT;

CREATE TABLE requests (
    owner   TEXT    NOT NULL,
    id      TEXT    NOT NULL,                      -- request_id
    body    TEXT    NOT NULL,                      -- sha256 of the request's body
    at      INTEGER NOT NULL,
    job     TEXT    NOT NULL,                      -- '' = no job
    answer  TEXT,                                  -- dispatch.ReservationGrant, or the refusal
    refused INTEGER NOT NULL,
    PRIMARY KEY (owner, id)
) STRICT, WITHOUT ROWID;

CREATE INDEX requests_by_age ON requests (at);

CREATE TABLE settings (
    name  TEXT NOT NULL PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;
