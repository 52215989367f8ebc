package live

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"unicode"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
	"evenkeel/gateway/advice"
	"evenkeel/gateway/detect"
)

// shown is a proxy with so many ranks, some of which are not well.
func shown(ranks int) *Document {
	d := &Document{
		AtMs: 1_767_225_600_000,
		Facts: detect.Facts{
			Proxy: detect.Proxy{ID: "proxy-a", Version: "v1.2.3", UptimeS: 7300, Ready: true, Policy: "evenkeel", Places: 1024, PlacesUsed: 17,
				Open: 512},
			Traffic: detect.Traffic{Rates: detect.Rates{RequestsPerS: 14.2, TokensPerS: 12_345},
				TTFT: detect.Latency{P50Ms: 692.4, P99Ms: 2628, Samples: 9}},
			Failures: []detect.Failed{{Outcome: "queue_full", Last5Min: 12, LastHour: 1200, SinceStart: 34_000},
				{Outcome: "internal_error", SinceStart: 3}},
			Advice: []advice.Advice{{Model: "big-moe", Says: "Decode has 2 ranks, and 4 are advised."}},
			Prefill: detect.Prefill{Policy: "finish", Waiting: 3, QueueMax: 1000, HitShare: .41, Engines: []detect.PrefillEngine{
				{ID: "p1:8100", State: "open", KVShare: .5, GateShare: .9, Inflight: 2, NewTokens: 4096, HitShare: .4}, {ID: "p2:8100", State: "out", GateShare: .9, Why: "refused"},
			}},
			Engines: []detect.Engine{{ID: "p1:8100", Role: "prefill", State: "up"},
				{ID: "p2:8100", Role: "prefill", State: "down", Why: "connection refused", SinceS: 12}},
			Geo:    &detect.Geo{Peers: []detect.Peer{{ID: "us-1", Region: "us", Up: true, RTTMs: 81.2, InFlight: 3}}},
			Scopes: []detect.Scope{{Group: "main", Phase: "owns", Holder: "proxy-a", Epoch: 7}},
		},
		Incidents: []detect.Incident{
			{Severity: "bad", Headline: "Engine outage", What: "Prefill engine p2:8100 is down: connection refused", SinceMs: 1_767_225_588_000, Clients: "Prompts go elsewhere.", Next: "Look at its log.", Runbook: "EvenkeelEngineDown", Command: "curl -sm 3 -i http://p2:8100/health"},
			{Severity: "warn", What: "Decode rank d0:8200/1 of group main drained", SinceMs: 1_767_225_000_000, UntilMs: 1_767_225_030_000},
		},
		Models: []Model{{
			Model: detect.Model{Name: "big-moe", Pool: detect.Pool{Entries: 17, OldestS: 2.8}},
			Groups: []Group{{
				Group: detect.Group{
					GroupLoads: board.GroupLoads{Name: "main", Barrier: true, Policy: "evenkeel", ImbalanceTokens: 9744, IdleShare: .054}, StepMs: 9.48,
					ModelMs: 9.2, LostShare: .051,
				},
			}},
		}},
		Decisions: []Decision{
			{AtMs: 1_767_225_600_000, Prompt: 20, Why: "queue"},
			{AtMs: 1_767_225_600_000, Prompt: 4000, Prefill: "p1:8100", Rank: "d0:8200/0", WaitMs: 120, Outcome: "ok", Why: "best F 12"},
		},
	}
	g := &d.Models[0].Groups[0]
	for i := range ranks {
		r := detect.Rank{Name: fmt.Sprintf("d%d:8200/%d", i/16, i%16), State: detect.RankUp, InSteps: true, KVTokens: int64(50_000 + 100*i),
			Capacity: 100_000, Used: 20, Slots: 32, TokenMs: 31}
		switch i {
		case 1:
			r.State = detect.RankDraining
		case 2:
			r.State, r.InSteps, r.KVTokens = detect.RankDown, false, 1_000_000
		default:
			g.MostTokens = r.KVTokens
		}
		g.Ranks = append(g.Ranks, r)
	}
	g.SteppingRanks, g.MeanTokens = max(0, ranks-1), 45_000
	return d
}

func TestThePageOfText(t *testing.T) {
	require.Equal(t, `proxy-a v1.2.3, up 2 h, 00:00:00 UTC: ready
! bad, for 12 s: Engine outage
    Prefill engine p2:8100 is down: connection refused.
    Prompts go elsewhere.
    Next: Look at its log. Runbook: EvenkeelEngineDown.
curl -sm 3 -i http://p2:8100/health
14.2 requests/s (0.0/s fail), 512 open, 12k tokens/s, policy evenkeel
TTFT p50 692.4, p99 2628.0 ms; TPOT – (last minute)
failed with queue_full: 0 in 10 s, 12 in 5 min, 1200 in 1 h, 34k in all
advice for big-moe: Decode has 2 ranks, and 4 are advised.

model big-moe: 17 in the pool, the oldest for 2.8 s; 17 of 1024 places taken
  group main: 3 of 4 ranks step, policy evenkeel, imbalance 9744 tokens, idle
    5.4 %, 5.1 % of 9.2 ms lost, step 9.5 ms
    d0:8200/0   ██████████████████|█▉   50k  50 %  20/32 slots 31 ms/token
    d0:8200/1 D ██████████████████|█▉   50k  50 %  20/32 slots 31 ms/token
    d0:8200/2 x down
    d0:8200/3   ██████████████████|██   50k  50 %  20/32 slots 31 ms/token
    KV tokens: mean 45k, most 50k (d0:8200/3), least 50k (d0:8200/0)
    x down: d0:8200/2
    D draining: d0:8200/1

prefill policy finish: 3 of at most 1000 requests wait, hits 41 % of tokens
  p2:8100 out    KV   0 % of 90 %, 0 probes, 0 new, hits 0 %  refused
  p1:8100 open   KV  50 % of 90 %, 2 probes, 4096 new, hits 40 %
engines: 1 of 2 are up
  prefill p2:8100: down for 12 s  connection refused
peer us-1 in us, round trip 81.2 ms, 3 requests in flight: up
engines of main: owns, owner proxy-a, epoch 7
over 10 min ago, after 30 s: “Decode rank d0:8200/1 of group main drained”
last decisions:
  00:00:00 UTC 20 tokens, – → –, runs  queue
  00:00:00 UTC 4000 tokens, p1:8100 → d0:8200/0, waited 120 ms, ok  best F 12
`, textOf(shown(4), 80))
}

// hostile has every text of a document speak to the terminal, at length.
func hostile(t *testing.T, d *Document) *Document {
	var replace func(v any) any
	replace = func(v any) any {
		switch v := v.(type) {
		case string:
			return "x\x1b]0;owned\a\x1b[2J\u202e\u009b1m\r\n\t\xff界⚡" + strings.Repeat("wide", 200)
		case []any:
			for i := range v {
				v[i] = replace(v[i])
			}
		case map[string]any:
			for k := range v {
				v[k] = replace(v[k])
			}
		}
		return v
	}
	text, err := json.Marshal(d)
	require.NoError(t, err)
	var words any
	require.NoError(t, json.Unmarshal(text, &words))
	text, err = json.Marshal(replace(words))
	require.NoError(t, err)
	changed := &Document{}
	require.NoError(t, json.Unmarshal(text, changed))
	return changed
}

func TestThePageOfTextFits(t *testing.T) {
	for name, change := range map[string]func(*Document) *Document{
		"as it is": func(d *Document) *Document { return d },
		"hostile":  func(d *Document) *Document { return hostile(t, d) },
		"empty":    func(*Document) *Document { return &Document{} },
		"much of all": func(d *Document) *Document {
			for range 300 {
				d.Incidents, d.Models, d.Engines = append(d.Incidents, d.Incidents[0]), append(d.Models, d.Models[0]), append(d.Engines, d.Engines[1])
				d.Prefill.Engines, d.Decisions = append(d.Prefill.Engines, d.Prefill.Engines[0]), append(d.Decisions, d.Decisions[0])
			}
			return d
		},
	} {
		for _, width := range []int{40, 100, 400} {
			for _, ranks := range []int{0, 1, 16, 17, 144, 5000} {
				page := textOf(change(shown(ranks)), width)
				lines := strings.Split(strings.TrimSuffix(page, "\n"), "\n")
				require.LessOrEqual(t, len(lines), linesOfText, "%s, %d ranks", name, ranks)
				for _, line := range lines {
					require.LessOrEqual(t, columns(line), width, "%s, %d ranks: %q", name, ranks, line)
					for _, r := range line {
						require.True(t, unicode.IsPrint(r), "%s: %q", name, line)
					}
				}
			}
		}
	}
	require.Equal(t, []int{3, 4, 1, 4}, []int{columns("a→█"), columns("界面"), columns("…"), columns("⚡⚡")})
}

// Many ranks are a picture, in which a letter marks those that are not up.
func TestAGroupOfManyRanksIsAFewLines(t *testing.T) {
	for width, want := range map[int]int{80: 9, 160: 7, 400: 7} {
		_, group, _ := strings.Cut(textOf(shown(144), width), "  group main")
		group, _, _ = strings.Cut(group, "\n\n")
		require.LessOrEqual(t, strings.Count(group, "\n"), want, "%d columns:\n%s", width, group)
		require.Contains(t, group, "least 50k (d0:8200/0)")
		require.True(t, strings.HasSuffix(group, "\n    x down: d0:8200/2\n    D draining: d0:8200/1"), group)
	}
	d := shown(20)
	g := &d.Models[0].Groups[0]
	g.MostTokens, g.MeanTokens, g.Rounds = 80_000, 40_000, &Rounds{Says: "Since the start 31 % of steps had a prefill."}
	for i := range g.Ranks {
		g.Ranks[i].KVTokens, g.Ranks[i].Unread, g.Ranks[i].Backlog = int64(10_000*(1+i%8)), 0, int64(1000*i)
	}
	g.Ranks[7].Unread = 70_000
	require.Contains(t, textOf(d, 100), `
  80k     ▂▄▆     ▂▄▆█
    0 ▂Dx████▂▂▄▆█████▂▄▆█
  new   ▁▁▂▂▃▃▃▄▄▅▅▅▆▆▇▇██
    KV tokens: mean 40k, most 80k (d0:8200/15), least 10k (d0:8200/0)
    x down: d0:8200/2
    D draining: d0:8200/1
    Since the start 31 % of steps had a prefill.
`)
}

// Where the step model is not known, no saving is claimed: the model is what tells it.
func TestThereIsNoSavingWithoutAStepModel(t *testing.T) {
	d := shown(4)
	g := &d.Models[0].Groups[0]
	g.ModelMs, g.ModelWhy = 0, "step time does not follow the fullest rank: does its load hardly matter?"
	page := textOf(d, 100)
	require.Contains(t, page, "There is no step model: step time does not follow the fullest rank: does its load hardly\n      matter?\n")
	require.NotContains(t, page, "saved")
	require.NotContains(t, page, " lost")
	require.NotContains(t, page, "Replayed")
	d.Traffic.TPOT = detect.Latency{P50Ms: 93, P99Ms: 95, Samples: 3}
	require.NotContains(t, textOf(d, 100), ", step", "answers get a token ten times as late, so they did not come in common steps")
}

func TestIncidentsOfThePageOfText(t *testing.T) {
	d := shown(4)
	d.Incidents = nil
	require.Contains(t, textOf(d, 100), "\nNo incident: nothing is wrong that can be seen from here.\n14.2 requests/s")
	for i := range 12 {
		d.Incidents = append(d.Incidents, detect.Incident{Severity: "bad", Headline: "Outage " + strconv.Itoa(i), What: "A thing is wrong",
			SinceMs: d.AtMs - 9000, LastMs: d.AtMs - 3000})
	}
	page := textOf(d, 100)
	require.Contains(t, page, "\n! bad, for 9 s, not found for 3 s and over if it stays so: Outage 2\n    A thing is wrong.\n")
	require.Contains(t, page, "\n! bad, for 9 s, not found for 3 s and over if it stays so: Outage 3: A thing is wrong\n")
	require.Contains(t, page, "\n! 2 more incidents\n")
	require.Less(t, strings.Index(page, "! 2 more"), strings.Index(page, "requests/s"), "what is wrong comes first")

	// A command is broken such that it can be copied: a shell reads the same words.
	for _, command := range []string{
		`curl -s -H "Authorization: Bearer $TOKEN" -X POST -H "Content-Type: application/json" -d '{"deadline": "10s"}' "$ADMIN/workers/d0:8200/0/drain"`,
		`curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/live?once" | jq -r '.models[].groups[].ranks[] | "\(.token_ms // "-") ms \(.running) running \(.name)"' | sort -rn | head`,
		"curl " + strings.Repeat("x", 100),
	} {
		d.Incidents[0].Command = command
		for _, width := range []int{40, 60, 80, 400} {
			require.Contains(t, strings.NewReplacer("'\\\n'", "", "\\\n", "").Replace(textOf(d, width)), "\n"+command+"\n")
		}
	}

	// An advice is of the last minute, and crowds are of now.
	d.Advice[0].Says = "Both sides have enough ranks."
	require.NoError(t, json.Unmarshal([]byte(`[{"kind":"none","reason":"balanced"}]`), &d.Advice[0].Steps))
	require.Contains(t, textOf(d, 100), "Both sides have enough ranks.")
	d.Incidents[0].Crowded = true
	require.NotContains(t, textOf(d, 100), "Both sides have enough ranks.")
	require.Contains(t, textOf(d, 100), "not known: many requests wait now")
}

func TestPeopleGetThePageOfTextByCurl(t *testing.T) {
	f := NewFake(144)
	f.Change(func(f *detect.Facts) { f.Proxy.ID = "then" })
	l, second, url := serve(t, f)
	second()
	at := l.Document(t.Context()).AtMs
	f.Change(nil)
	for query, want := range map[string]struct {
		status int
		says   string
	}{
		"?once&text":                     {200, "eu-1 dev, up 25 h"},
		"?text&width=400":                {200, "tokens/s, policy evenkeel\n"},
		"?once&text&width=39":            {400, "width is a number of columns from 40 to 400"},
		"?once&text&width=401":           {400, "bad_query"},
		"?once&text&width=":              {400, "bad_query"},
		"?once&text&width=wide":          {400, "bad_query"},
		"?text&at=noon":                  {400, "at is a moment in Unix ms"},
		"?text&at=1":                     {404, "not_found"},
		fmt.Sprintf("?text&at=%d", at):   {200, "then dev, up 25 h"},
		fmt.Sprintf("?once&at=%d", at+1): {200, `"id":"then"`},
	} {
		resp, err := http.Get(url + "/live" + query)
		require.NoError(t, err)
		body, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		_ = resp.Body.Close()
		require.Equal(t, want.status, resp.StatusCode, query)
		require.Contains(t, string(body), want.says, query)
		if want.status == 200 && strings.Contains(query, "text") {
			require.Equal(t, "text/plain; charset=utf-8", resp.Header.Get("Content-Type"))
		}
	}
}

// Ranks without a barrier are one group, and the names that their groups have in the config stay.
func TestRanksWithoutBarrierKeepTheNamesOfTheirGroups(t *testing.T) {
	d := shown(3)
	g := &d.Models[0].Groups[0]
	g.Name, g.Barrier = "", false
	for i := range g.Ranks {
		g.Ranks[i].Group = []string{"a", "b", "b"}[i]
	}
	require.Contains(t, textOf(d, usualWidth), "ranks without barrier of groups a, b: ")
}
