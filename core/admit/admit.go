// Package admit decides which jobs may hold a host's memory and disk at the
// same time. It is pure: who asked and what each one holds come in as values,
// a Verdict and the lines of the trace go out. The ledger keeps the claims and
// does the waiting.
//
// Vocabulary: a claim is what one job has asked for. It waits or it is granted.
// Waiting claims are granted in the order in which they were asked for and in
// no other, so that a large job is not overtaken for ever by small ones; the
// cost is that a small job may wait behind a large one beside which it would
// fit. A granted claim counts with all that it asked for, whether or not the
// job has taken it yet.
//
// Memory is counted in MiB of guests' RAM. Of the disk, a claim counts with what
// its job is still expected to write: its expectation less what its directory
// holds, which is gone from the free space already. Inodes are counted like
// bytes.
package admit

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"virtkit/core/numa"
	"virtkit/core/usage"
)

// Amounts are what a claim is for. A zero field claims nothing.
type Amounts struct {
	MemMiB int64 `json:"mem_mib"`
	Disk   int64 `json:"disk_bytes,omitempty"` // that the job's directory is expected to hold at most
	Inodes int64 `json:"inodes,omitempty"`     // likewise
	CPUs   int   `json:"cpus,omitempty"`       // told, not limited
}

// Claim is another job's, as a decision sees it.
type Claim struct {
	ID      string
	Seq     uint64 // order of asking; smaller = earlier
	Waiting bool
	// Granted is what counts now: all of it, or while Waiting what an earlier
	// grant holds already.
	Granted Amounts
	Place   *numa.Placement // nil = on no memory node in particular
	// Used and UsedInodes are what the job's directory holds now.
	Used, UsedInodes int64
}

// Limits are what a host admits by. The zero Limits admit everything.
type Limits struct {
	MemMiB int64 // budget of guests' RAM; 0 = memory is not admitted
	Disk   bool  // room for job directories is admitted
}

// Any reports whether anything is limited.
func (l Limits) Any() bool { return l.MemMiB > 0 || l.Disk }

// Room is the filesystem of the job directories.
type Room struct {
	Path       string // the directory, for people
	Size, Free int64  // bytes
	Inodes     int64  // it can hold; 0 = it does not count them
	FreeInodes int64
}

// Ask is what a job asks for.
type Ask struct {
	ID  string // names the claim: the job's directory
	Seq uint64 // filled in by who keeps the claims
	Amounts
	Guest numa.Guest // the job's own, without its services; for its memory node
	// Prior, when set, is the descriptor of a claim that was granted before and
	// becomes this one, in its place of the queue.
	Prior *os.File
	// Keep are digests of images that may not be evicted to make room: those
	// that the job is about to use.
	Keep []string
}

// Verdict is the answer to an Ask at one moment.
type Verdict struct {
	OK bool
	// What is short; all false when only others' turn keeps the ask waiting.
	Memory, Disk, Inodes bool
	Ahead                int   // claims that wait and asked first
	Reserved             int64 // MiB granted to others
	Free, Yet            int64 // bytes free, and still to be written by the jobs admitted there
	FreeInodes           int64
	YetInodes            int64
	// Short is how many bytes would have to come free for the whole
	// expectation; at least 0.
	Short int64
}

// Decide answers an ask, given all other live claims. room is nil when Limits
// do not need it.
func Decide(a Ask, others []Claim, l Limits, room *Room) Verdict {
	var v Verdict
	var held, heldInodes int64
	alone := true
	for _, c := range others {
		if c.Waiting && c.Seq < a.Seq {
			v.Ahead++
		}
		v.Reserved += c.Granted.MemMiB
		if c.Granted.Disk > 0 {
			alone = false
			v.Yet += max(0, c.Granted.Disk-c.Used)
			v.YetInodes += max(0, c.Granted.Inodes-c.UsedInodes)
			held += c.Used
			heldInodes += c.UsedInodes
		}
	}
	v.Memory = l.MemMiB > 0 && v.Reserved+a.MemMiB > l.MemMiB
	if l.Disk && room != nil && a.Disk > 0 {
		v.Free, v.FreeInodes = room.Free, room.FreeInodes
		v.Short = max(0, v.Yet+a.Disk-v.Free)
		if !alone {
			// No more than could ever come free while the others live: a job that
			// once filled the whole filesystem must not wait for ever.
			v.Disk = v.Free < min(a.Disk, v.Free+held)+v.Yet
			v.Inodes = room.Inodes > 0 && v.FreeInodes < min(a.Inodes, v.FreeInodes+heldInodes)+v.YetInodes
		}
	}
	v.OK = v.Ahead == 0 && !v.Memory && !v.Disk && !v.Inodes
	return v
}

// Resource names what a waiting ask waits for, for people.
func (v Verdict) Resource(l Limits) string {
	var out []string
	if v.Memory {
		out = append(out, "memory")
	}
	if v.Disk {
		out = append(out, "disk space")
	}
	if v.Inodes {
		out = append(out, "inodes")
	}
	switch {
	case out != nil:
		return strings.Join(out, " and ")
	case l.MemMiB > 0:
		return "memory"
	}
	return "disk space"
}

// WaitLines say why an ask waits, one line for each resource that is short, or
// one of the queue's when none is.
func (v Verdict) WaitLines(a Ask, l Limits, room *Room) []string {
	var out []string
	short := v.Memory || v.Disk || v.Inodes
	if v.Memory || !short && l.MemMiB > 0 {
		out = append(out, fmt.Sprintf("waiting for %d MiB of the host's %d MiB memory budget (%d MiB reserved, %d job(s) asked first)",
			a.MemMiB, l.MemMiB, v.Reserved, v.Ahead))
	}
	if room != nil && (v.Disk || !short && l.MemMiB == 0) {
		out = append(out, fmt.Sprintf("waiting for %s of room in %s (%s free, %s still to be written by the jobs admitted there, %d job(s) asked first)",
			usage.Size(a.Disk), room.Path, usage.Size(v.Free), usage.Size(v.Yet), v.Ahead))
	}
	if room != nil && v.Inodes {
		out = append(out, fmt.Sprintf("waiting for %d inodes in %s (%d free, %d still to be made by the jobs admitted there, %d job(s) asked first)",
			a.Inodes, room.Path, v.FreeInodes, v.YetInodes, v.Ahead))
	}
	return out
}

// AdmittedLine says that the wait is over.
func AdmittedLine(waited time.Duration, resource string) string {
	return fmt.Sprintf("admitted after waiting %ds for %s", int64(waited.Seconds()), resource)
}

// Evicted is what was removed to make room.
type Evicted struct {
	Images int
	Chunks int   // files of layers that no image needed
	Bytes  int64 // that came free
	// Could is how many bytes might have come free; when that is less than what
	// was needed nothing was removed.
	Could int64
}

// Line says what was evicted for a job that was short of needed bytes.
func (e Evicted) Line(stateDir, room string, needed int64) string {
	return fmt.Sprintf("evicted %d unused image(s) and %d unreferenced cache chunk file(s) under %s for room in %s: %s freed of the %s needed",
		e.Images, e.Chunks, stateDir, room, usage.Size(e.Bytes), usage.Size(needed))
}

// Gate lets jobs in.
type Gate interface {
	// Limits are the host's.
	Limits() Limits
	// Room is the filesystem that job directories are on.
	Room() (Room, error)
	// Admit returns once the ask is granted. It waits for its turn and for
	// room, telling so in whole lines, until ctx ends or the host's limit on
	// waiting, which is a fault.Busy. An ask that can never be granted fails at
	// once. Without limits it returns a Held that holds nothing.
	Admit(ctx context.Context, a Ask, say func(line string)) (Held, error)
	// Release forgets what a job that is gone had claimed. A claim that is still
	// held stays.
	Release(id string) error
}

// Held is a granted claim. It is given up by Release, and by the kernel when
// every process that holds File is gone.
type Held interface {
	// File is what keeps the claim; nil when there is nothing to keep. A
	// process that inherits it keeps the claim for its own life.
	File() *os.File
	// Place is the memory node that goes with the claim; nil = none was chosen.
	Place() *numa.Placement
	// Close gives this process's hold up, and leaves the claim to whoever
	// inherited File.
	Close() error
	// Release gives the claim up.
	Release() error
}
