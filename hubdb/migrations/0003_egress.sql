-- Egress rules, and what nodes report of the egress of placed jobs.

CREATE TABLE egress_rules (
    name TEXT NOT NULL PRIMARY KEY,
    doc  TEXT NOT NULL                             -- hub.EgressRule
) STRICT, WITHOUT ROWID;

CREATE TABLE job_egress (
    n        INTEGER PRIMARY KEY,                  -- the job's
    revision INTEGER NOT NULL,
    data     BLOB    NOT NULL                      -- policy.Report, zstd
) STRICT;
