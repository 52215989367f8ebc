package selftest

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

var together = []refengine.Connector{refengine.AscendLayerwise, refengine.SGLang}

// meeting is a config of engines that work on a request at the same time.
func meeting(t *testing.T, connector refengine.Connector, p, d *refengine.Engine) *config.Config {
	t.Helper()
	profile := mooncake.Profile{Connector: string(connector)}
	if connector == refengine.SGLang {
		profile.BootstrapPort = port(t, p.URLs()[0])
	}
	c := config.Default()
	c.Profiles = map[string]mooncake.Profile{config.DefaultProfile: profile}
	c.Engines = config.Engines{Prefill: []config.Engine{{URL: p.URLs()[0]}}, Decode: []config.Engine{{URL: d.URLs()[0]}}}
	if connector == refengine.AscendLayerwise {
		c.Bind.Listen, c.Bind.CallbackTimeout = "127.0.0.1:0", 20*time.Second
	}
	require.NoError(t, c.Validate())
	return c
}

func TestEnginesThatWorkTogetherAreTried(t *testing.T) {
	for _, connector := range together {
		t.Run(string(connector), func(t *testing.T) {
			p := start(t, refengine.Config{Role: refengine.Prefill, Connector: connector})
			d := start(t, refengine.Config{Role: refengine.Decode, Connector: connector})
			found := Run(t.Context(), meeting(t, connector, p, d), Options{})
			require.Empty(t, pick(found, Bad))
			require.Empty(t, pick(found, Warn))
			require.Len(t, pick(found, OK), 4)
			require.Contains(t, strings.Join(pick(found, OK), "\n"), "decode: decoded 4 tokens of a hand-off")
			ps, ds := p.Stats(), d.Stats()
			require.EqualValues(t, []int64{1, 1}, []int64{ps.Requests, ds.Requests})
			require.Zero(t, ps.Pins+int(ds.Stranded()))
			require.Zero(t, ps.Aborted+ds.Aborted+ds.LostPushes+ps.Leaks+ds.KeyMismatches)
		})
	}
}

// An engine is tried with one of the other side before it serves; one that is alone only has to
// answer.
func TestOneOfThoseThatWorkTogether(t *testing.T) {
	for _, connector := range together {
		t.Run(string(connector), func(t *testing.T) {
			p := start(t, refengine.Config{Role: refengine.Prefill, Connector: connector})
			d := start(t, refengine.Config{Role: refengine.Decode, Connector: connector})
			c := meeting(t, connector, p, d)
			m := newTester(c, nil)
			defer m.client.Close()
			defer m.listen(t.Context())()
			_, err := TryEngine(t.Context(), c, "decode", c.Engines.Decode[0], nil, m.callbacks)
			require.NoError(t, err)
			require.Zero(t, d.Stats().Requests)
			for role, e := range map[string]config.Engine{"prefill": c.Engines.Prefill[0], "decode": c.Engines.Decode[0]} {
				partners := c.Engines.Decode
				if role == "decode" {
					partners = c.Engines.Prefill
				}
				_, err := TryEngine(t.Context(), c, role, e, partners, m.callbacks)
				require.NoError(t, err)
			}
			require.Eventually(t, func() bool { return d.Stats().Finished == 2 }, 30*time.Second, time.Millisecond)
			require.NoError(t, p.SetFaults(refengine.Rule{Fault: refengine.Internal}))
			_, err = TryEngine(t.Context(), c, "prefill", c.Engines.Prefill[0], c.Engines.Decode, m.callbacks)
			require.ErrorContains(t, err, "a probe was answered with 500")
			_, err = TryEngine(t.Context(), c, "decode", c.Engines.Decode[0], c.Engines.Prefill, m.callbacks)
			require.NoError(t, err, "what its partner fails at is not held against it")
			require.NoError(t, p.SetFaults())
			require.NoError(t, d.SetFaults(refengine.Rule{Fault: refengine.Reject}))
			_, err = TryEngine(t.Context(), c, "decode", c.Engines.Decode[0], c.Engines.Prefill, m.callbacks)
			require.ErrorContains(t, err, "the decode request was answered with 400")
		})
	}
}

// Every rank of either side is tried in a room that belongs to it.
func TestRanksThatWorkTogether(t *testing.T) {
	p := start(t, refengine.Config{Role: refengine.Prefill, Connector: refengine.SGLang, DPSize: 2, DPMode: "internal"})
	d := start(t, refengine.Config{Role: refengine.Decode, Connector: refengine.SGLang, DPSize: 4, DPMode: "internal"})
	c := meeting(t, refengine.SGLang, p, d)
	c.Engines.Prefill[0].Ranks, c.Engines.Decode[0].Ranks = 2, 4
	found := Run(t.Context(), c, Options{})
	require.Empty(t, pick(found, Bad))
	require.Empty(t, pick(found, Warn))
	for rank := range 4 {
		require.EqualValues(t, 1, d.Stats().Ranks[rank].Concurrent, "rank %d was tried", rank)
	}
}

func TestWhatIsWrongBetweenEnginesThatWorkTogether(t *testing.T) {
	for _, row := range []struct {
		name            string
		connector       refengine.Connector
		prefill, decode []refengine.Rule
		change          func(c *config.Config)
		want            string
	}{
		{"a prefill engine of SGLang that fails", refengine.SGLang, []refengine.Rule{{Fault: refengine.Internal}}, nil, nil, "prefill: a probe was answered with 500"},
		{"a decode engine of SGLang that refuses", refengine.SGLang, nil, []refengine.Rule{{Fault: refengine.Reject}}, nil, "the decode request was answered with 400"},
		{"a bootstrap port where nothing is", refengine.SGLang, nil, nil, func(c *config.Config) {
			p := c.Profiles[config.DefaultProfile]
			p.BootstrapPort = 1
			c.Profiles[config.DefaultProfile] = p
		}, "decode: with the KV of prefill "},
		{"a prefill engine that fails after the callback", refengine.AscendLayerwise, []refengine.Rule{{Fault: refengine.Internal}}, nil, nil, "prefill: a probe was answered with 500"},
		{"a decode engine that refuses before it calls back", refengine.AscendLayerwise, nil, []refengine.Rule{{Fault: refengine.Reject}}, nil, "the decode request was answered with 400"},
		{"no callback", refengine.AscendLayerwise, nil, []refengine.Rule{{Fault: refengine.NoCallback}}, func(c *config.Config) { c.Bind.CallbackTimeout = 200 * time.Millisecond }, "its callback did not come within 200ms; it must reach http://127.0.0.1:"},
		{"a callback that names a stranger", refengine.AscendLayerwise, nil, []refengine.Rule{{Fault: refengine.CallbackBadHost}}, nil, "203.0.113.7"},
	} {
		t.Run(row.name, func(t *testing.T) {
			p := start(t, refengine.Config{Role: refengine.Prefill, Connector: row.connector, Faults: row.prefill})
			d := start(t, refengine.Config{Role: refengine.Decode, Connector: row.connector, Faults: row.decode})
			c := meeting(t, row.connector, p, d)
			if row.change != nil {
				row.change(c)
			}
			found := Run(t.Context(), c, Options{})
			require.Len(t, pick(found, Bad), 1, "%v", found)
			require.Contains(t, pick(found, Bad)[0], row.want)
			require.Eventually(t, func() bool { return p.Stats().Running+p.Stats().Waiting+d.Stats().Running+d.Stats().Waiting == 0 },
				30*time.Second, 5*time.Millisecond, "neither leg is left alone")
		})
	}
}

// A proxy that runs has the address at which engines call back.
func TestCallbacksThatCannotBeHeard(t *testing.T) {
	p := start(t, refengine.Config{Role: refengine.Prefill, Connector: refengine.AscendLayerwise})
	d := start(t, refengine.Config{Role: refengine.Decode, Connector: refengine.AscendLayerwise})
	c := meeting(t, refengine.AscendLayerwise, p, d)
	taken, err := net.Listen("tcp", c.Bind.Listen)
	require.NoError(t, err)
	defer func() { _ = taken.Close() }()
	c.Bind.Listen = taken.Addr().String()
	found := Run(t.Context(), c, Options{})
	require.Empty(t, pick(found, Bad))
	require.Contains(t, strings.Join(pick(found, OK), "\n"), "callbacks cannot be heard (")
	require.Zero(t, p.Stats().Requests+d.Stats().Requests)
	_, err = TryEngine(t.Context(), c, "decode", c.Engines.Decode[0], c.Engines.Prefill, nil)
	require.NoError(t, err)
	require.Zero(t, p.Stats().Requests+d.Stats().Requests)
}

// An engine that works with a partner is tried with those that answer, however many before them in
// the list do not.
func TestPartnersThatAreDownDoNotCount(t *testing.T) {
	p := start(t, refengine.Config{Role: refengine.Prefill, Connector: refengine.SGLang})
	failing := start(t, refengine.Config{Role: refengine.Decode, Connector: refengine.SGLang})
	good := start(t, refengine.Config{Role: refengine.Decode, Connector: refengine.SGLang})
	require.NoError(t, failing.SetFaults(refengine.Rule{Fault: refengine.Reject}))
	c := meeting(t, refengine.SGLang, p, failing)
	partners := []config.Engine{{URL: "http://" + closedAddress(t)}, {URL: failing.URLs()[0]}, {URL: good.URLs()[0]}}
	for i := range partners {
		var err error
		partners[i], err = c.Complete("decode", partners[i])
		require.NoError(t, err)
	}
	_, err := TryEngine(t.Context(), c, "prefill", c.Engines.Prefill[0], partners, nil)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return good.Stats().Finished == 1 }, 30*time.Second, time.Millisecond,
		"its prefill is decoded by the engine that can")
}

// A callback may still be read when its pair has failed, and the test learns the hosts of the next
// partner. This is for the race detector.
func TestACallbackThatComesTooLateIsReadBesideTheNextPair(t *testing.T) {
	const text = `{"token_ids":[],"request_id":"cmpl-x-0","do_remote_prefill":false,"do_remote_decode":true,"remote_block_ids":[[7]],` +
		`"remote_block_size":[128],"remote_engine_id":"d","remote_host":"127.0.0.1","remote_port":31000,"remote_tp_size":1,` +
		`"remote_pcp_size":1,"remote_dcp_size":1,"remote_cached_tokens":0}`
	began := make(chan net.Conn, 1)
	decode := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			_, _ = io.WriteString(w, `{"data":[{"id":"m"}]}`)
			return
		}
		var asked struct {
			KV struct{ Metaserver string } `json:"kv_transfer_params"`
		}
		_ = json.NewDecoder(r.Body).Decode(&asked)
		u, _ := url.Parse(asked.KV.Metaserver)
		conn, err := net.Dial("tcp", u.Host)
		if err != nil {
			t.Error(err)
			return
		}
		_, _ = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n", u.Path, len(text))
		_, _ = io.ReadFull(conn, make([]byte, len("HTTP/1.1 100 Continue\r\n\r\n"))) // the body is being read now
		began <- conn
		w.WriteHeader(http.StatusInternalServerError)
	}))
	defer decode.Close()
	prefill := start(t, refengine.Config{Role: refengine.Prefill, Connector: refengine.AscendLayerwise})
	c := config.Default()
	c.Profiles = map[string]mooncake.Profile{config.DefaultProfile: {Connector: mooncake.AscendLayerwise}}
	c.Engines = config.Engines{Prefill: []config.Engine{{URL: prefill.URLs()[0]}}, Decode: []config.Engine{{URL: decode.URL}}}
	c.Bind.Listen = "127.0.0.1:0"
	require.NoError(t, c.Validate())
	m := newTester(c, nil)
	defer m.client.Close()
	defer m.listen(t.Context())()
	p, err := m.firstRank(t.Context(), "prefill", c.Engines.Prefill[0])
	require.NoError(t, err)
	d, err := m.firstRank(t.Context(), "decode", c.Engines.Decode[0])
	require.NoError(t, err)
	q := newQuery(mooncake.Completions, "m", "x", shortPrompt)
	_, prefillErr, decodeErr := m.sendConcurrently(t.Context(), p, d, q, "x")
	require.NoError(t, prefillErr)
	require.ErrorContains(t, decodeErr, "was answered with 500")
	conn := <-began
	defer func() { _ = conn.Close() }()
	_, err = io.WriteString(conn, text)
	require.NoError(t, err)
	m.learnHosts(t.Context(), p)
	r, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	require.NoError(t, r.Body.Close())
	require.Equal(t, http.StatusNotFound, r.StatusCode, "no request waits for it any more")
}
