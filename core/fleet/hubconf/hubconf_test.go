package hubconf_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hubconf"
)

func none(string) string { return "" }

func load(t *testing.T, text string) (*hubconf.Config, error) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "hub.toml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return hubconf.Load(file, none, "/home/u")
}

func TestDefaults(t *testing.T) {
	c, err := hubconf.Load("", none, "/home/u")
	if err != nil || c.Addr != "127.0.0.1:8443" || c.DataDir != "/home/u/.local/share/virtkit/hub" || c.HeartbeatSecs != 5 || c.MetricsAddr != "" {
		t.Errorf("%+v, %v", c, err)
	}
	c, _ = hubconf.Load("", func(k string) string {
		if k == "XDG_DATA_HOME" {
			return "/data"
		}
		return ""
	}, "/home/u")
	if c.DataDir != "/data/virtkit/hub" {
		t.Errorf("data_dir %s", c.DataDir)
	}
	if _, err := load(t, "addr = '0.0.0.0:8443'\ntls_cert='/c'\ntls_key='/k'\ndata_dir='/d'\nmetrics_addr='[::1]:9'\nlog_format='json'\nheartbeat_secs=1\n"); err != nil {
		t.Error(err)
	}
}

func TestJobOptions(t *testing.T) {
	c, err := load(t, "job_lost_after_secs = 60\njob_history = 7\nkept_failure_output = '0'\nkept_output = '2M'\nimage_affinity_max_load = 0.0\n")
	if err != nil {
		t.Fatal(err)
	}
	want := hub.JobOptions{LostAfter: time.Minute, History: 7, KeptFailure: -1, Kept: 2 << 20, KeptTotal: 1 << 30, AffinityMaxLoad: -1, AffinityMaxExtra: 0.25}
	if got := c.Options(); got != want {
		t.Errorf("options %+v, want %+v", got, want)
	}
}

func TestRefusals(t *testing.T) {
	for text, want := range map[string]string{
		"\naddress = 'x'":                                "hub.toml:2:1: address: is no key of hub.toml",
		"\n\naddr = 5":                                   "hub.toml:3:",
		"addr = ":                                        "hub.toml:1:",
		"\naddr = '0.0.0.0:8443'":                        "hub.toml:2: addr: 0.0.0.0:8443 is not on loopback",
		"addr = 'example.com:8443'":                      "is not on loopback",
		"addr = ':8443'":                                 "names no host",
		"addr = '127.0.0.1'":                             "is not HOST:PORT",
		"addr = '127.0.0.1:nosuchport'":                  `"nosuchport" is no port`,
		"tls_cert = '/c'":                                "tls_cert and tls_key go together",
		"data_dir = 'hub'":                               "hub.toml:1: data_dir: \"hub\" is not an absolute path",
		"heartbeat_secs = 0":                             "heartbeat_secs: 0 is not between 1 and 300",
		"metrics_addr = '192.0.2.1:9100'":                "metrics_token_file is needed",
		"job_lost_after_secs = 0":                        "job_lost_after_secs: 0 is not between 1 and 86400",
		"job_history = 0":                                "job_history: 0 is not between 1 and 1000000",
		"kept_output = '5M'":                             "kept_output: 5M is more than 4M",
		"kept_output_total = 'much'":                     "is not a size",
		"image_affinity_max_load = 3.0":                  "image_affinity_max_load: 3 is not between 0 and 2",
		"image_affinity_max_extra_load = -1.0":           "image_affinity_max_extra_load: -1 is not between 0 and 1",
		"log_format = 'xml'":                             "neither text nor json",
		"heartbeat_secs = 500\nlog_format = 'something'": "log_format",
	} {
		_, err := load(t, text)
		if err == nil || !strings.Contains(err.Error(), want) || fault.KindOf(err) != fault.Usage {
			t.Errorf("%q: %v (%s), want %q", text, err, fault.KindOf(err), want)
		}
	}
}

func TestDataDir(t *testing.T) {
	c := hubconf.Config{DataDir: filepath.Join(t.TempDir(), "a/b")}
	if err := c.MakeDataDir(); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(c.DataDir, 0o750); err != nil {
		t.Fatal(err)
	}
	if err := c.MakeDataDir(); err == nil || !strings.Contains(fault.HintOf(err), "chmod 700") {
		t.Errorf("open to the group: %v", err)
	}
}

func TestMetricsToken(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	for text, want := range map[string]string{"0123456789abcdef\nmore": "0123456789abcdef", "short": ""} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		c := hubconf.Config{MetricsTokenFile: file}
		if got, err := c.MetricsToken(); got != want || (err != nil) != (want == "") || err != nil && strings.Contains(err.Error(), text) {
			t.Errorf("%q: %q, %v", text, got, err)
		}
	}
}
