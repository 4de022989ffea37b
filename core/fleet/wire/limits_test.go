package wire_test

import (
	"testing"
	"time"

	"virtkit/core/fleet/wire"
)

// TestLimits holds the numbers of the protocol to those of the reference: what
// keeps to them is tested elsewhere, by their names.
func TestLimits(t *testing.T) {
	for name, v := range map[string][2]int{
		"bytes of a message":              {wire.MaxMessage, 1 << 20},
		"entries of an inventory's list":  {wire.MaxList, 64},
		"characters of a text":            {wire.MaxText, 256},
		"VMs of a list":                   {wire.MaxWorkloads, 256},
		"bytes of a list of VMs":          {wire.MaxWorkloadBytes, 256 << 10},
		"missed heartbeats":               {wire.MissedBeats, 3},
		"bytes of an ID":                  {wire.IDLen, 16},
		"seconds that a request is good":  {wire.DownloadMaxSkewSecs, 300},
		"the first version, to monitor":   {wire.VersionMonitor, 1},
		"the version that steers":         {wire.VersionSteer, 2},
		"the version of placed jobs":      {wire.VersionJobs, 3},
		"the version of CI tools":         {wire.VersionTools, 4},
		"the version of the runner none":  {wire.VersionNone, 5},
		"the version of egress reports":   {wire.VersionEgress, 6},
		"the lowest version that is read": {wire.Spoken.Min, 1},
		"the highest":                     {wire.Spoken.Max, 6},
	} {
		if v[0] != v[1] {
			t.Errorf("%s: %d, the reference has %d", name, v[0], v[1])
		}
	}
	for name, v := range map[string][2]time.Duration{
		"a step of a handshake":    {wire.HandshakeStep, 10 * time.Second},
		"a heartbeat":              {wire.DefaultHeartbeat, 5 * time.Second},
		"the shortest heartbeat":   {wire.MinHeartbeat, time.Second},
		"the longest":              {wire.MaxHeartbeat, 300 * time.Second},
		"a command's validity":     {wire.CommandValid, 24 * time.Hour},
		"a heartbeat of a million": {wire.Clamp(1_000_000), 300 * time.Second},
		"a heartbeat of nothing":   {wire.Clamp(0), time.Second},
	} {
		if v[0] != v[1] {
			t.Errorf("%s: %s, the reference has %s", name, v[0], v[1])
		}
	}
	if wire.ExporterLabel != "EXPERIMENTAL-vk-fleet-node-auth" || wire.ChannelLen != 32 {
		t.Errorf("%d bytes of the exporter %q", wire.ChannelLen, wire.ExporterLabel)
	}
	if wire.SessionPath != "/v1/node" || wire.EnrollPath != "/v1/enroll" {
		t.Errorf("paths %s, %s", wire.SessionPath, wire.EnrollPath)
	}
}
