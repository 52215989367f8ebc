package fleetcall

import (
	"encoding/json"
	"net/http"
	"net/url"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/owner"
	"evenkeel/mooncake"
)

var paths = map[string][]string{
	"/pause": {config.CallPauses, config.CallEmpties}, "/resume": {config.CallResumes}, "/is_paused": {},
}

// published are p:1, which prefills and decodes in group a, and a:2 and b:2 in groups a and b. All
// are up, and then come some events.
func published(t *testing.T, events ...roster.Event) *roster.Snapshot {
	r, now := roster.New(), time.Unix(1000, 0)
	in := func(role, id, group string) roster.Event {
		p := mooncake.Profile{}.WithDefaults()
		u, err := url.Parse("http://" + id)
		require.NoError(t, err)
		return roster.Entered{Engine: &roster.Engine{
			ID: id, Role: role, Target: &engine.Target{ID: id, URL: u, Rank: -1}, Profile: &p, Conf: config.Engine{Group: group, Slots: 1},
		}}
	}
	all := []roster.Event{
		in(roster.Prefill, "p:1", ""), in(roster.Decode, "p:1", "a"), in(roster.Decode, "a:2", "a"), in(roster.Aggregated, "b:2", "b"),
	}
	for _, key := range []string{"prefill p:1", "decode p:1", "decode a:2", "aggregated b:2"} {
		all = append(all, roster.Health{Key: key, Status: engine.Status{Up: true, StartTime: 1}})
	}
	for _, e := range append(all, events...) {
		r.Apply(e, now, nil)
		r.Apply(roster.Tick{}, now, nil)
	}
	return roster.Derive(r)
}

func TestWhomACallReaches(t *testing.T) {
	for _, row := range []struct {
		name    string
		call    Call
		events  []roster.Event
		ids     []string
		status  int // 0: it is made
		because string
	}{
		{"all engines, each address once", Call{Path: "/pause"}, nil, []string{"p:1", "a:2", "b:2"}, 0, ""},
		{"a group", Call{Path: "/pause?mode=keep", Group: "a"}, nil, []string{"p:1", "a:2"}, 0, ""},
		{"engines of a region that another proxy owns", Call{Path: "/pause"}, []roster.Event{roster.Owners{Kind: owner.Regions}}, nil, 404, "no engine"},
		{"the end of a pause whose engines have left", Call{Path: "/resume", Group: "a"},
			[]roster.Event{roster.PauseBegun{Group: "a"}, roster.Removed{Key: "decode p:1"}, roster.Removed{Key: "decode a:2"}}, nil, 0, ""},
		{"a question", Call{Path: "/is_paused", Method: "get"}, nil, []string{"p:1", "a:2", "b:2"}, 0, ""},
		{"no such group", Call{Path: "/pause", Group: "c"}, nil, nil, 404, `no engine that decodes is in group "c"`},
		{"a path that is not listed", Call{Path: "/paus"}, nil, nil, 404, `did you mean "/pause"?`},
		{"a path of clients", Call{Path: "/v1/completions"}, nil, nil, 404, "is not among the paths"},
		{"another host", Call{Path: "http://x/pause"}, nil, nil, 404, "is not among the paths"},
		{"a second request in the query", Call{Path: "/pause?a=b HTTP/1.1\r\n"}, nil, nil, 400, "encode it"},
		{"another method", Call{Path: "/pause", Method: "CONNECT"}, nil, nil, 400, "not a method"},
		{"a GET with a body", Call{Path: "/is_paused", Method: "GET", Body: json.RawMessage(`{}`)}, nil, nil, 400, "no body"},
		{"the end of a pause of all, for a group", Call{Path: "/resume", Group: "a"}, []roster.Event{roster.PauseBegun{Path: "/pause"}}, nil, 409, "all engines are paused"},
		{"the end of its own pause", Call{Path: "/resume", Group: "a"}, []roster.Event{roster.PauseBegun{Group: "a"}}, []string{"p:1", "a:2"}, 0, ""},
		{"an end without a pause, of which a restart knows nothing", Call{Path: "/resume"}, nil, []string{"p:1", "a:2", "b:2"}, 0, ""},
		{
			"an end for a group, after one that only some did", Call{Path: "/resume", Group: "a"},
			[]roster.Event{roster.PauseBegun{}, roster.PauseEnded{Unresumed: []string{"decode a:2"}}}, []string{"p:1", "a:2"}, 0, "",
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			p, wrong := row.call.check(paths, published(t, row.events...))
			if row.status != 0 {
				require.NotNil(t, wrong)
				require.Equal(t, row.status, wrong.Status)
				require.Contains(t, wrong.Reason, row.because)
				return
			}
			require.Nil(t, wrong)
			var ids []string
			for _, to := range p.targets {
				ids = append(ids, to.id)
			}
			require.Equal(t, row.ids, ids)
			require.Equal(t, p.Method == http.MethodGet, len(p.Body) == 0)
		})
	}
}

// A call to all engines reaches p:1 as an engine that prefills, too, which no pause of a group
// covers.
func TestWhichEnginesRestartedInTheirPause(t *testing.T) {
	again := engine.Status{Up: true, StartTime: 2}
	now := published(t, roster.PauseBegun{Group: "a"}, roster.Health{Key: "prefill p:1", Status: again},
		roster.Health{Key: "decode p:1", Status: again}, roster.Health{Key: "aggregated b:2", Status: again})
	restarted := map[string]bool{}
	for _, to := range targetsOf(now, "") {
		restarted[to.id] = to.hasRestarted(now)
	}
	require.Equal(t, map[string]bool{"p:1": true, "a:2": false, "b:2": false}, restarted)
}

func TestWhetherAnEngineDidIt(t *testing.T) {
	for _, row := range []struct {
		name  string
		in    Answer
		why   string // empty: it did
		acted bool   // perhaps
	}{
		{"vLLM pauses", Answer{Status: 200, Body: json.RawMessage(`{"status":"paused"}`), sent: true}, "", true},
		{"SGLang flushes", Answer{Status: 200, Body: json.RawMessage(`"Cache flushed."`), sent: true}, "", true},
		{"an empty answer", Answer{Status: 200, sent: true}, "", true},
		{"vLLM resets nothing", Answer{Status: 200, Body: json.RawMessage(`{"success":false}`), sent: true}, "says that it did not", true},
		{"it resets", Answer{Status: 200, Body: json.RawMessage(`{"success":true}`), sent: true}, "", true},
		{"SGLang flushes nothing, or not on every rank", Answer{Status: 400, sent: true}, "answered 400", true},
		{"vLLM without dev mode", Answer{Status: 404, sent: true}, "VLLM_SERVER_DEV_MODE=1", false},
		{"another method", Answer{Status: 405, sent: true}, "VLLM_SERVER_DEV_MODE=1", false},
		{"no answer in time", Answer{Error: "late", sent: true}, "late", true},
		{"no connection", Answer{Error: "refused"}, "refused", false},
	} {
		t.Run(row.name, func(t *testing.T) {
			a := row.in
			a.setDone()
			require.Equal(t, row.why == "", a.Done)
			require.Contains(t, a.Error, row.why)
			require.Equal(t, row.acted, a.mayHaveActed())
		})
	}
}

func TestWhatFollowsForThePause(t *testing.T) {
	did, refused, unknown, away := Answer{Done: true, Status: 200, sent: true}, Answer{Status: 400, sent: true}, Answer{sent: true}, Answer{}
	paused, end := roster.PauseBegun{Path: "/pause"}, roster.PauseEnded{Unresumed: []string{"decode a:2"}}
	for _, row := range []struct {
		name    string
		path    string
		answers [3]Answer
		events  []roster.Event // before
		end     bool
		left    []string
	}{
		{"all pause", "/pause", [3]Answer{did, did, did}, nil, false, nil},
		{"one refuses", "/pause", [3]Answer{did, refused, did}, nil, false, nil},
		{"none does", "/pause", [3]Answer{refused, away, refused}, nil, true, nil},
		{"none does, and one had not resumed before", "/pause", [3]Answer{refused, away, refused}, []roster.Event{paused, end}, true, []string{"decode a:2"}},
		{"none does any more", "/pause", [3]Answer{refused, away, refused}, []roster.Event{paused}, false, nil},
		{"one may come to it", "/pause", [3]Answer{refused, unknown, refused}, nil, false, nil},
		{"all resume", "/resume", [3]Answer{did, did, did}, []roster.Event{paused}, true, nil},
		{"one does not", "/resume", [3]Answer{unknown, did, did}, []roster.Event{paused}, true, []string{"prefill p:1", "decode p:1"}},
		{"none does", "/resume", [3]Answer{refused, unknown, away}, []roster.Event{paused}, false, nil},
		{"something else", "/is_paused", [3]Answer{did, did, did}, []roster.Event{paused}, false, nil},
	} {
		t.Run(row.name, func(t *testing.T) {
			engines := published(t, row.events...)
			p, wrong := Call{Path: row.path}.check(paths, engines)
			require.Nil(t, wrong)
			end, left := p.endsPause(row.answers[:], engines)
			require.Equal(t, row.end, end)
			require.Equal(t, row.left, left)
		})
	}
}

// Tools that write every field of a call write null for a body that is left out.
func TestABodyOfNullIsNoBody(t *testing.T) {
	for method, body := range map[string]string{"POST": "{}", "GET": ""} {
		var call Call
		require.NoError(t, json.Unmarshal([]byte(`{"path":"/is_paused","method":"`+method+`","group":"","body":null}`), &call))
		p, wrong := call.check(paths, published(t))
		require.Nil(t, wrong, method)
		require.Equal(t, body, string(p.Body), method)
	}
}
