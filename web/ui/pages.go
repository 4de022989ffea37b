package ui

import (
	"strconv"
	"strings"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hubadmin"
	"virtkit/core/fleet/hubtext"
	"virtkit/core/fleet/wire"
	"virtkit/core/ui"
)

// jobsPage is how many jobs a page has.
const jobsPage = 100

// table is rows under heads; a row may lead somewhere by its first cell.
type table struct {
	Heads []string
	Rows  []row
}

type row struct {
	At      string // path of its own page, "" = none
	Cells   []string
	Remarks []string
}

// nodes is the table of vk-hub nodes.
func (u *UI) nodes(*visit) (*answer, error) {
	t := table{Heads: hubtext.NodeHeads}
	now := u.o.Hub.Now()
	for _, n := range u.o.Hub.Snapshot().Sorted() {
		v := hubadmin.NodeOf(u.o.Hub, n, false)
		t.Rows = append(t.Rows, row{Cells: hubtext.NodeRow(&v, now), Remarks: hubtext.Remarks(&v)})
	}
	return &answer{page: "nodes", title: "Nodes", data: t}, nil
}

// jobs is the table of vk-hub jobs, newest first, 100 a page.
func (u *UI) jobs(v *visit) (*answer, error) {
	q := hub.JobQuery{Limit: jobsPage + 1}
	if s := v.r.URL.Query().Get("before"); s != "" {
		n, err := strconv.ParseInt(s, 10, 64)
		if err != nil || n < 1 {
			return nil, fault.Newf(fault.Usage, "before=%s is no number of a job", wire.Clean(s, 40))
		}
		q.Before = n
	}
	list, err := u.o.Hub.Jobs(v.Context(), q)
	if err != nil {
		return nil, err
	}
	data := struct {
		table
		Older int64 // where the next page begins, 0 = there is none
		Newer bool
	}{table: table{Heads: hubtext.JobHeads}, Newer: q.Before > 0}
	if len(list) > jobsPage {
		list = list[:jobsPage]
		data.Older = list[jobsPage-1].N
	}
	s, now := u.o.Hub.Snapshot(), u.o.Hub.Now()
	for _, j := range list {
		w := hubadmin.JobOf(u.o.Hub, s, j)
		data.Rows = append(data.Rows, row{At: "/jobs/" + j.ID, Cells: hubtext.JobRow(&w, now)})
	}
	return &answer{page: "jobs", title: "Jobs", data: data}, nil
}

// job is what vk-hub jobs show tells of one.
func (u *UI) job(v *visit) (*answer, error) {
	j, err := hubadmin.FindJob(v.Context(), u.o.Hub, v.r.PathValue("id"))
	if err != nil {
		return nil, err
	}
	data := struct {
		Fields []hubtext.Field
		Output string
		Start  int64
		Size   int64
	}{Fields: hubtext.JobFields(j, u.o.Hub.Now().In(time.UTC))}
	if j.End != nil {
		data.Output, data.Start, data.Size = strings.TrimRight(ui.Clean(string(j.End.Data)), "\n"), j.End.Start, j.End.Size
	}
	return &answer{page: "job", title: "Job " + j.ID, data: data}, nil
}
