package gateway_test

import (
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/detect"
	"evenkeel/gateway/live"
	"evenkeel/mooncake"
)

// What GET /live?once says is what the proxy and its engines do.
func TestTheLiveDocumentTellsTheProxy(t *testing.T) {
	t.Parallel()
	c := start(t, options{dirty: true, token: "secret", decode: []refengine.Config{{}, {}, {}, {}}, configure: func(cfg *config.Config) {
		for i := range cfg.Engines.Decode {
			cfg.Engines.Decode[i].Group, cfg.Engines.Decode[i].Barrier = "main", "dp"
		}
		cfg.Admin.TokenFile = filepath.Join(t.TempDir(), "token")
		require.NoError(t, os.WriteFile(cfg.Admin.TokenFile, []byte("secret"), 0o600))
	}})
	up := time.Now()
	require.Equal(t, http.StatusUnauthorized, c.Ask(http.MethodGet, c.admin+"/live?once", "").Status)
	for path, kind := range map[string]string{"/": "text/html; charset=utf-8", "/live.js": "text/javascript; charset=utf-8",
		"/live.css": "text/css; charset=utf-8", "/live.svg": "image/svg+xml"} {
		r := c.Ask(http.MethodGet, c.admin+path, "") // what has no secrets needs no token
		require.Equal(t, http.StatusOK, r.Status, path)
		require.Equal(t, kind, r.Header.Get("Content-Type"))
		require.Contains(t, r.Header.Get("Content-Security-Policy"), "default-src 'none'; script-src 'self'; ")
	}
	require.Equal(t, http.StatusNotFound, c.get("/index.html").Status)
	see := func() (d live.Document) {
		t.Helper()
		r := c.get("/live?once")
		require.Equal(t, http.StatusOK, r.Status, r.Body)
		require.NotRegexp(t, `[:\[,]\s*null`, r.Body, "a value that is null; the command of an incident may name /dev/null")
		require.NoError(t, json.Unmarshal([]byte(r.Body), &d))
		return d
	}
	require.Equal(t, "right", c.Judge("one two three", `"stream":true,`))
	c.settled(false)
	c.Eventually("the document tells of the request", func() bool { return see().Traffic.TPOT.Samples == 1 })
	d := see()
	require.True(t, d.Proxy.Ready)
	require.NotEmpty(t, d.Proxy.ID)
	require.Equal(t, "evenkeel", d.Models[0].Groups[0].Policy)
	require.Equal(t, 1, d.Traffic.TTFT.Samples)
	require.Positive(t, d.Traffic.TPOT.P99Ms)
	require.Len(t, d.Engines, 5)
	require.Len(t, d.Prefill.Engines, 1)
	require.Equal(t, "open", d.Prefill.Engines[0].State)
	require.Empty(t, since(up, d.Incidents))
	require.Equal(t, "ok", d.Decisions[0].Outcome)
	require.Contains(t, d.Decisions[0].Why, "prefill ")
	require.Contains(t, d.Decisions[0].Why, "Decode policy evenkeel chose among 4 ranks with room.")
	ranked := d.Decisions[0].Rank
	require.Equal(t, http.StatusOK, c.get("/decisions?id="+d.Decisions[0].ID).Status)
	c.Eventually("what the engines say is known", func() bool {
		for _, r := range d.Models[0].Groups[0].Ranks {
			if _, ok := c.gw.Gauges(r.ID); !ok {
				return false
			}
		}
		return true
	})
	ranks, held := 0, false
	for _, g := range d.Models[0].Groups {
		ranks += len(g.Ranks)
		for _, r := range g.Ranks {
			require.Equal(t, detect.RankUp, r.State)
			require.Equal(t, 16, r.Slots)
			said, ok := c.gw.Gauges(r.ID)
			require.True(t, ok, "what the engine says of %s is known", r.Name)
			require.GreaterOrEqual(t, said.Running, 0.)
			held = held || r.Name == ranked
		}
	}
	require.Equal(t, 4, ranks)
	require.True(t, held, "%s is none of the ranks", ranked)

	// A rank whose engine is dead takes no part in the steps of its group: where it counted as idle,
	// level ranks beside a dead one seemed to lose a part of every step.
	t.Run("a rank that is dead enters no mean and no sum", func(t *testing.T) {
		for range 8 {
			c.Endless()
		}
		group := func() live.Group { return see().Models[0].Groups[0] }
		require.Equal(t, 4, group().SteppingRanks)
		dead := group().Ranks[0].Name
		for _, e := range c.Decode {
			if "http://"+dead == e.URLs()[0] {
				e.Kill()
			}
		}
		var g live.Group
		c.Eventually("one rank is down and empty, and the dispatcher knows", func() bool {
			g = group()
			return g.Ranks[0].State == detect.RankDown && g.Ranks[0].Used == 0 && !g.Ranks[0].InSteps
		})
		require.Zero(t, g.Ranks[0].Slots, "nothing may be sent there")
		require.Equal(t, 3, g.SteppingRanks)
		held := []int64{g.Ranks[1].KVTokens, g.Ranks[2].KVTokens, g.Ranks[3].KVTokens}
		slices.Sort(held)
		least, sum, most := held[0], held[0]+held[1]+held[2], held[2]
		require.Positive(t, least)
		require.Equal(t, least, g.LeastTokens)
		require.Equal(t, most, g.MostTokens)
		require.Equal(t, sum, g.KVTokens)
		require.InDelta(t, float64(sum)/3, g.MeanTokens, 1e-9)
		require.Equal(t, 3*most-sum, g.ImbalanceTokens)
		require.InDelta(t, float64(3*most-sum)/float64(3*most), g.IdleShare, 1e-9)
		metrics := c.get("/metrics").Body
		require.NotContains(t, metrics, `rank="`+dead+`"`, "a zero would enter every mean, and a free slot would look starved")
		require.Contains(t, metrics, `rank="`+g.Ranks[1].Name+`"`)
		shown := map[string]float64{}
		for line := range strings.Lines(metrics) {
			series, value, _ := strings.Cut(strings.TrimSpace(line), " ")
			if strings.HasPrefix(series, "evenkeel_rank_kv_tokens{") || strings.HasPrefix(series, "evenkeel_imbalance_tokens{") {
				number, err := strconv.ParseFloat(value, 64)
				require.NoError(t, err)
				shown[series] = number
			}
		}
		imbalance := shown[`evenkeel_imbalance_tokens{group="main"}`]
		delete(shown, `evenkeel_imbalance_tokens{group="main"}`)
		loads := slices.Sorted(maps.Values(shown))
		require.Len(t, loads, 3)
		require.InDelta(t, 3*loads[2]-loads[0]-loads[1]-loads[2], imbalance, 1e-9)
		require.Contains(t, c.get("/status").Body, `"stepping_ranks": 3`)
	})

	require.NoError(t, c.gw.DrainEngine("decode", see().Models[0].Groups[0].Ranks[1].Name, 0))
	gone := see().Models[0].Groups[0].Ranks[2].Name
	for _, e := range c.Decode {
		if "http://"+gone == e.URLs()[0] {
			e.Close()
		}
	}
	c.Eventually("a drained rank and an engine that is gone are told", func() bool {
		d := see()
		states := map[string]int{}
		for _, g := range d.Models[0].Groups {
			for _, r := range g.Ranks {
				states[r.State]++
			}
		}
		return states[detect.RankDraining] == 1 && states[detect.RankDown] == 2 && states[detect.RankUp] == 1
	})
	var incidents []detect.Incident
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the incidents: %+v", incidents)
		}
	})
	c.Eventually("an incident tells of both, or one of each if a slow machine let more than 30 s pass between them", func() bool {
		var down []detect.Incident
		incidents = see().Incidents
		for _, i := range incidents {
			// The clients of the engines' streams get an error: before this is counted, the incident is a
			// warning.
			isAsBad := i.Severity == detect.Warn || i.Severity == detect.Bad && strings.HasSuffix(i.Harm, " requests failed")
			if i.Kind == detect.EngineDown && isAsBad && i.Panel == "engines" {
				down = append(down, i)
			}
		}
		if len(down) == 2 {
			// Findings that begin more than a moment (30 s) apart do not begin together.
			apart := time.Duration(down[0].SinceMs-down[1].SinceMs) * time.Millisecond
			isOfOne := func(i detect.Incident) bool { return strings.HasPrefix(i.What, "Decode engine 127.0.0.1:") }
			return apart.Abs() > 30*time.Second && isOfOne(down[0]) && isOfOne(down[1])
		}
		return len(down) == 1 && strings.HasPrefix(down[0].What, "2 decode engines on host 127.0.0.1 are down: ")
	})
}

// since are the incidents that began since then, but those of the machine: if it is busy, engines
// are down for some time after the start of the proxy, and the proxy says that it gets too little
// time.
func since(then time.Time, all []detect.Incident) []detect.Incident {
	return slices.DeleteFunc(all, func(i detect.Incident) bool {
		return i.SinceMs < then.UnixMilli() || i.Kind == detect.ProxyBusy
	})
}

// What a prefill engine counts of KV that was read too late is on the page and in the metric.
func TestKVThatIsReadTooLateIsAnIncident(t *testing.T) {
	t.Parallel()
	nixl := []refengine.Config{{Connector: refengine.NIXLPull}}
	profile := mooncake.Profile{Connector: mooncake.NIXLPull}
	c := start(t, options{dirty: true, profile: profile, prefill: nixl, decode: nixl})
	engine := c.Prefill[0].URLs()[0]
	post := func(path, body string) []byte {
		r, err := http.Post(engine+path, "application/json", strings.NewReader(body))
		require.NoError(t, err)
		defer r.Body.Close()
		text, err := io.ReadAll(r.Body)
		require.NoError(t, err)
		require.Equal(t, http.StatusOK, r.StatusCode, "%s", text)
		return text
	}
	var made struct {
		KV struct {
			ID string `json:"remote_request_id"`
		} `json:"kv_transfer_params"`
	}
	require.NoError(t, json.Unmarshal(post("/v1/completions", `{"model":"ref","prompt":"one two","max_tokens":1,`+
		`"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false}}`), &made))
	c.Eventually("an incident names the engine", func() bool {
		// The first one is in time, and the count must be seen to grow.
		post("/kv/pull", `{"drain":true,"id":`+strconv.Quote(made.KV.ID)+`}`)
		var d live.Document
		require.NoError(t, json.Unmarshal([]byte(c.get("/live?once").Body), &d))
		return slices.ContainsFunc(d.Incidents, func(i detect.Incident) bool {
			return i.Kind == detect.ReadTooLate && "http://"+i.Subject == engine
		})
	})
	require.Contains(t, c.get("/metrics").Body, `kind="kv_read_late"`)
}
