package detect_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
	"evenkeel/gateway/detect"
	"evenkeel/gateway/live/livetest"
)

const hung = "it does not answer its health check (5 s): engine 10.0.3.10:8000: read response head: context deadline exceeded"

// told is what a finding says to an operator.
type told struct{ severity, panel, where, what string }

func toldOf(d *detect.Facts) []told {
	list := []told{}
	for _, f := range detect.Find(d, detect.Ended{All: 6000, Failed: 1200}) {
		list = append(list, told{severity: f.Severity, panel: f.Panel, where: f.Where, what: f.What + f.Suffix})
	}
	return list
}

func TestFindingsSayWhatIsWrongAndWhere(t *testing.T) {
	rank := func(d *detect.Facts, i int) *detect.Rank { return &d.Models[0].Groups[0].Ranks[i] }
	for name, tt := range map[string]struct {
		change func(*detect.Facts)
		want   []told
	}{
		"nothing is wrong": {func(*detect.Facts) {}, []told{}},
		"the proxy cannot serve": {func(d *detect.Facts) { d.Proxy.Ready, d.Proxy.Why = false, "no healthy decode engine" },
			[]told{{detect.Bad, "proxy", "", "The proxy is not ready: no healthy decode engine"}}},
		"a proxy that drains is as somebody wants it": {func(d *detect.Facts) { d.Proxy.Ready, d.Proxy.Draining, d.Proxy.Why = false, true, "draining" },
			[]told{{detect.Warn, "proxy", "", "The proxy drains: it is being taken out of service"}}},
		"an audit is never off": {func(d *detect.Facts) { d.Proxy.DriftSlots = 1 },
			[]told{{detect.Bad, "proxy", "", "The proxy's accounts are off by 1 slot and 0 KV tokens, which is a bug that you should report"}}},
		"some failures are the world's": {func(d *detect.Facts) { d.Traffic.RequestsPerS, d.Traffic.FailuresPerS = 100, 1 }, []told{}},
		"more are not": {func(d *detect.Facts) { d.Traffic.RequestsPerS, d.Traffic.FailuresPerS = 100, 2 },
			[]told{{detect.Bad, "traffic", "", "1,200 of the 6,000 requests that ended in the last minute failed"}}},
		"how they fail": {func(d *detect.Facts) {
			d.Traffic.RequestsPerS, d.Traffic.FailuresPerS, d.Failures = 100, 2,
				[]detect.Failed{{Outcome: "queue_full", Last10S: 9, LastMinute: 300}, {Outcome: "upstream_broken", LastMinute: 900}}
		}, []told{{detect.Bad, "traffic", "",
			"1,200 of the 6,000 requests that ended in the last minute failed, most of them with upstream_broken"}}},
		"KV was read after its engine had freed it": {func(d *detect.Facts) {
			d.Engines[0].ReadLate = &detect.ReadLate{HandOffs: 2, AgoS: 20}
			d.Engines[1].ReadLate = &detect.ReadLate{HandOffs: 1, AgoS: 301}
		}, []told{{detect.Warn, "prefill", "10.0.1.10:8000", "Prefill engine 10.0.1.10:8000 counts 2 hand-offs that decode engines " +
			"reported when their KV was freed already. If they read it, it may have been another prompt's"}}},
		"an engine is out, and what is bad comes first": {func(d *detect.Facts) {
			rank(d, 3).State = detect.RankDraining
			d.Engines[12].State, d.Engines[12].Why = "out", "three requests failed in a row"
		}, []told{
			{detect.Bad, "engines", "10.0.3.10:8000", "Decode engine 10.0.3.10:8000 is out and gets no requests: three requests failed in a row"},
			{detect.Warn, "ranks", "dp", "Decode rank 10.0.3.10:8000/3 of group dp drains: it takes no new requests"},
		}},
		"an engine that drains, once for all of its ranks": {func(d *detect.Facts) {
			d.Engines[12].Draining = true
			for i := range 16 {
				rank(d, i).State = detect.RankDraining
			}
		}, []told{{detect.Warn, "engines", "10.0.3.10:8000", "Decode engine 10.0.3.10:8000 drains: it takes no new requests"}}},
		"ranks are named, the first few": {func(d *detect.Facts) {
			for i := range 5 {
				rank(d, i).KVTokens = rank(d, i).Capacity
			}
		}, []told{{detect.Warn, "ranks", "dp",
			"5 decode ranks of group dp have full KV caches: 10.0.3.10:8000/0, 10.0.3.10:8000/1, 10.0.3.10:8000/2 and 2 more"}}},
		"all of them fail so": {func(d *detect.Facts) {
			d.Traffic.RequestsPerS, d.Traffic.FailuresPerS, d.Failures = 100, 2,
				[]detect.Failed{{Outcome: "upstream_broken", LastMinute: 1200, Last5Min: 1200}}
		}, []told{{detect.Bad, "traffic", "",
			"1,200 of the 6,000 requests that ended in the last minute failed, all of them with upstream_broken"}}},
		"which queue is full": {func(d *detect.Facts) {
			d.Traffic.RequestsPerS, d.Traffic.FailuresPerS, d.Proxy.PlacesUsed, d.Prefill.Waiting = 100, 20, 327, 0
			d.Failures = []detect.Failed{{Outcome: "upstream_broken", LastMinute: 500},
				{Outcome: "queue_full", Last10S: 9, LastMinute: 300, Why: "the arrival queue of model m is full (prefill.queue.max: 40)"}}
		}, []told{
			{detect.Bad, "traffic", "", "1,200 of the 6,000 requests that ended in the last minute failed, 500 of them with upstream_broken"},
			{detect.Bad, "prefill", "", "Requests are refused, because the arrival queue of model m is full (prefill.queue.max: 40). At the last look no requests waited in the arrival queue, and 327 of 400 places of the pool were taken"},
		}},
		"a key at its own limit is no overload, and no full queue": {func(d *detect.Facts) {
			taken(d, 1)
			d.Traffic.RequestsPerS, d.Traffic.FailuresPerS = 100, 20
			d.Failures = []detect.Failed{{Outcome: "queue_full", Last10S: 200, LastMinute: 1200,
				Why: "key a has all the answers that it may have at once", ByKeyLimit: true}}
		},
			[]told{{detect.Bad, "traffic", "",
				"1,200 of the 6,000 requests that ended in the last minute failed, all of them with queue_full, the " +
					"last one because key a has all the answers that it may have at once"}}},
		"prompts that wait for prefill are no overload of decode": {func(d *detect.Facts) { taken(d, 0); d.Prefill.Waiting = 900 }, []told{}},
		"with a full pool the arrival queue waits for decode": {func(d *detect.Facts) {
			taken(d, 0)
			d.Prefill.Waiting, d.Proxy.PlacesUsed = 900,
				d.Proxy.Places
		}, []told{
			{detect.Bad, "pool", "deepseek-r1", "All 768 decode slots of model deepseek-r1 are taken, and 900 requests wait in the arrival queue"},
		}},
		"who floods": {func(d *detect.Facts) {
			taken(d, 1404)
			d.Waiting = []detect.Waiting{{"batch", 1308}, {"chat", 60}, {"", 40}}
		}, []told{
			{detect.Bad, "pool", "deepseek-r1", "All 768 decode slots of model deepseek-r1 are taken, and 1,408 requests wait in the pool and in the arrival queue: 1,308 of the 1,408 that wait are of API key batch"},
		}},
		"prompts wait for prefill": {func(d *detect.Facts) {
			d.Prefill.Waiting, d.Prefill.BacklogS, d.Prefill.LongBacklogS = 114, 34.4, 25
			d.Waiting = []detect.Waiting{{"agents", 110}, {"chat", 4}}
			d.Prefill.Hits = &detect.Hits{"agents", 0.012, 0.97}
		}, []told{{detect.Bad, "prefill", "", "Prompts come faster than the prefill engines compute them: 114 requests wait, and a prompt that " +
			"comes now begins in about 34 s: " +
			"110 of the 114 that wait are of API key agents. Prefix caches had 97 % of the tokens of the prompts of API key agents, and have 1 % " +
			"since a minute ago: these prompts may begin differently now"}}},
		"a few long prompts hold up the short ones": {func(d *detect.Facts) {
			d.Prefill.Waiting, d.Prefill.BacklogS, d.Prefill.LongBacklogS, d.Prefill.Heaviest = 16, 13, 25,
				&detect.Heaviest{Key: "batch", Share: 0.97, Mean: 100_000}
			d.Waiting = []detect.Waiting{{"chat", 9}, {"batch", 7}}
		}, []told{{detect.Bad, "prefill", "", "Prompts come faster than the prefill engines compute them: 16 requests wait, and a prompt that " +
			"comes now begins in about 13 s. " +
			"97 % of the prompt tokens that prefill engines hold are of API key batch, whose prompts have 100,000 tokens in the mean"}}},
		"prompts wait for prefill, and the caches are as warm as before": {func(d *detect.Facts) {
			d.Prefill.Waiting, d.Prefill.BacklogS, d.Prefill.LongBacklogS, d.Prefill.Hits = 114, 34.4, 25, &detect.Hits{"", 0.5, 0.6}
		}, []told{{detect.Bad, "prefill", "", "Prompts come faster than the prefill engines compute them: 114 requests wait, and a prompt that " +
			"comes now begins in about 34 s"}}},
		"answers hold their slots for longer": {func(d *detect.Facts) {
			taken(d, 1404)
			g := &d.Models[0].Groups[0]
			g.FewTokensS, g.StepTokens, g.UsualTokens, g.TokenMs = 60, 1, 3.1, 32
		}, []told{
			{detect.Bad, "pool", "deepseek-r1",
				"All 768 decode slots of model deepseek-r1 are taken, and 1,408 requests wait in the pool and in the arrival queue. " +
					"Answers of group dp hold their slots for longer, because a step gives 1.0 tokens and gave 3.1 before"},
			{detect.Bad, "balance", "dp", "A step of group dp, all on host 10.0.3.10, gives 1.0 tokens to an answer, and gave 3.1 before, so that a token takes 32 ms"},
		}},
		"a slow rank is worth a look": {func(d *detect.Facts) {
			rank(d, 1).SlowMs, rank(d, 1).OthersMs = 304, 58
		}, []told{{detect.Warn, "ranks", "dp", "Rank 10.0.3.10:8000/1 gives a token in 304 ms, and the middle one of group dp in 58 ms"}}},
		"and is bad where a tenth of all that runs is there": {func(d *detect.Facts) {
			rank(d, 1).SlowMs, rank(d, 1).OthersMs, rank(d, 1).Running = 304, 58, 10_000
		}, []told{{detect.Bad, "ranks", "dp", "Rank 10.0.3.10:8000/1 gives a token in 304 ms, and the middle one of group dp in 58 ms"}}},
		"steps that take half as long again are worth a look": {func(d *detect.Facts) {
			g := &d.Models[0].Groups[0]
			g.SlowStepsS, g.StepMs, g.UsualMs = 60, 99, 50
		}, []told{{detect.Warn, "balance", "dp", "Steps of group dp, all on host 10.0.3.10, take 99 ms, and took 50 ms at such a load before"}}},
		"and are bad where they take twice as long": {func(d *detect.Facts) {
			g := &d.Models[0].Groups[0]
			g.SlowStepsS, g.StepMs, g.UsualMs = 60, 100, 50
		}, []told{{detect.Bad, "balance", "dp", "Steps of group dp, all on host 10.0.3.10, take 100 ms, and took 50 ms at such a load before"}}},
		"one of two prefill engines is away, and nobody waits": {func(d *detect.Facts) {
			two := d.Engines[:2]
			d.Engines = append(two[:2:2], d.Engines[12:]...) // decode engines
			d.Prefill.Engines = d.Prefill.Engines[:2]
			d.Engines[0].State, d.Engines[0].Why = "down", "connection refused"
		}, []told{{detect.Warn, "engines", "10.0.1.10:8000", "Prefill engine 10.0.1.10:8000 is down: connection refused"}}},
		"a config is refused": {func(d *detect.Facts) {
			d.Proxy.ConfigError = "e.yaml:15:10: limits.x: no such key; the keys here are a, b, c"
		}, []told{
			{detect.Warn, "proxy", "", "The config file was refused and is not in force: e.yaml:15:10: limits.x: no such key"},
		}},
		"certificates end": {func(d *detect.Facts) {
			for key, left := range map[string]time.Duration{"a": 14 * (24 * time.Hour), "b": 14*(24*time.Hour) - time.Minute, "c": (24 * time.Hour),
				"d": (24 * time.Hour) - time.Minute, "e": time.Hour, "f": -time.Hour} {
				d.Proxy.Certificates = append(d.Proxy.Certificates, detect.Certificate{key, left.Seconds()})
			}
			slices.SortFunc(d.Proxy.Certificates, func(x, y detect.Certificate) int { return strings.Compare(x.Key, y.Key) })
		}, []told{
			{detect.Bad, "proxy", "d", "The certificate of d ends in 23 hours"},
			{detect.Bad, "proxy", "e", "The certificate of e ends in less than two hours"},
			{detect.Bad, "proxy", "f", "The certificate of f has ended, and nobody who checks it can connect"},
			{detect.Warn, "proxy", "b", "The certificate of b ends in 13 days"},
			{detect.Warn, "proxy", "c", "The certificate of c ends in 1 day"},
		}},
		"nobody floods": {func(d *detect.Facts) { taken(d, 1404); d.Waiting = []detect.Waiting{{"batch", 704}, {"chat", 704}} }, []told{
			{detect.Bad, "pool", "deepseek-r1", "All 768 decode slots of model deepseek-r1 are taken, and 1,408 requests wait in the pool and in the arrival queue"},
		}},
		"KV memory is the cause while slots are free": {func(d *detect.Facts) {
			taken(d, 1404)
			for i := range 16 {
				rank(d, i).Used, rank(d, i).KVTokens = 20, 310_000
			}
			d.Waiting = []detect.Waiting{{"batch", 1408}}
		}, []told{
			{detect.Bad, "ranks", "deepseek-r1", "The KV caches of the decode ranks of model deepseek-r1 are 97 % full, so that 448 of 768 decode slots stay free, and 1,408 requests wait in the pool and in the arrival queue, all of API key batch"},
		}},
		"KV memory is full, and nobody waits": {func(d *detect.Facts) {
			for i := range 16 {
				rank(d, i).Used, rank(d, i).KVTokens = 20, 300_000
			}
		}, []told{}},
		"one slot": {func(d *detect.Facts) {
			g := &d.Models[0].Groups[0]
			g.Ranks = g.Ranks[:1]
			g.Ranks[0].Slots = 1
			taken(d, 1)
		}, []told{
			{detect.Bad, "pool", "deepseek-r1", "The only decode slot of model deepseek-r1 is taken, and 5 requests wait in the pool and in the arrival queue"},
		}},
		"some slots were just given back": {func(d *detect.Facts) { taken(d, 768); d.Models[0].Groups[0].Ranks[0].Used = 40 }, []told{
			{detect.Bad, "pool", "deepseek-r1", "760 of the 768 decode slots of model deepseek-r1 are taken, and 772 requests wait in the pool and in the arrival queue"},
		}},
		"the queues of several models are not one": {func(d *detect.Facts) {
			d.Models, d.Prefill.Waiting = append(d.Models, detect.Model{Name: "other"}), 1000
		}, []told{}},
		"a busy model is no overload": {func(d *detect.Facts) { taken(d, 300) }, []told{}},
		"as many wait as there are slots": {func(d *detect.Facts) { taken(d, 768) }, []told{
			{detect.Bad, "pool", "deepseek-r1", "All 768 decode slots of model deepseek-r1 are taken, and 772 requests wait in the pool and in the arrival queue"},
		}},
		"the metrics of a prefill engine are slow": {func(d *detect.Facts) { d.Prefill.ScrapeEveryMs, d.Prefill.Engines[1].ScrapeAgeMs = 500, 5200 },
			[]told{{detect.Warn, "prefill", "10.0.1.11:8000", "Prefill engine 10.0.1.11:8000 answers too late when it is asked for its metrics"}}},
		"a prefill engine has never told its load": {func(d *detect.Facts) { d.Prefill.ScrapeEveryMs, d.Prefill.Engines[1].ScrapeAgeMs = 500, -1 },
			[]told{{detect.Warn, "prefill", "10.0.1.11:8000",
				"Prefill engine 10.0.1.11:8000 has not told its load since it is up: its metrics cannot be read, or lack it"}}},
		"it is up since a moment ago": {func(d *detect.Facts) {
			d.Prefill.ScrapeEveryMs, d.Prefill.Engines[1].ScrapeAgeMs, d.Engines[1].SinceS = 500, -1, 3
		}, []told{}},
		"an engine hangs, and is not down yet": {func(d *detect.Facts) { d.Engines[12].Hangs, d.Engines[12].Why = true, hung },
			[]told{{detect.Bad, "engines", "10.0.3.10:8000",
				"Decode engine 10.0.3.10:8000 hangs: its port takes connections, but it does not answer its health check (5 s)"}}},
		"a hang has its own words when the engine is down": {func(d *detect.Facts) {
			d.Engines[12].Hangs, d.Engines[12].State, d.Engines[12].Why = true, "down", hung
		},
			[]told{{detect.Bad, "engines", "10.0.3.10:8000",
				"Decode engine 10.0.3.10:8000 hangs: its port takes connections, but it does not answer its health check (5 s)"}}},
		"an engine is up and not well": {func(d *detect.Facts) { d.Engines[1].Why = "engine 10.0.1.11:8000: no answer" },
			[]told{{detect.Warn, "engines", "10.0.1.11:8000", "Prefill engine 10.0.1.11:8000 is up, but something is amiss: no answer"}}},
		"a prefiller is full": {func(d *detect.Facts) { d.Prefill.Engines[1].State, d.Prefill.Engines[1].KVShare = "closed", 0.93 },
			[]told{{detect.Warn, "prefill", "10.0.1.11:8000", "Prefill engine 10.0.1.11:8000 takes no prompts, because its KV cache is 93 % full"}}},
		"a prefiller gives out what cannot be used": {func(d *detect.Facts) {
			e := &d.Prefill.Engines[1]
			e.State, e.Why = "out", "prefill "+e.ID+" answered without a usable hand-off: 100% wrong; do that"
		}, []told{{detect.Warn, "prefill", "10.0.1.11:8000", "Prefill engine 10.0.1.11:8000 takes no prompts, because earlier ones failed: " +
			"it answered without a usable hand-off: 100% wrong"}}},
		"most prefill engines are gone": {func(d *detect.Facts) {
			for i := range 7 {
				d.Engines[i].State, d.Engines[i].Why = "down", "refused"
			}
			d.Engines = d.Engines[5:] // two of seven prefill engines are gone
		}, []told{
			{detect.Warn, "engines", "10.0.1.15:8000", "Prefill engine 10.0.1.15:8000 is down: refused"},
			{detect.Warn, "engines", "10.0.1.16:8000", "Prefill engine 10.0.1.16:8000 is down: refused"},
		}},
		"one is gone, and requests fail": {func(d *detect.Facts) {
			d.Engines[1].State, d.Engines[1].Why = "down", "refused"
			d.Traffic.RequestsPerS, d.Traffic.FailuresPerS = 100, 2
		}, []told{
			{detect.Bad, "traffic", "", "1,200 of the 6,000 requests that ended in the last minute failed"},
			{detect.Bad, "engines", "10.0.1.11:8000", "Prefill engine 10.0.1.11:8000 is down: refused"},
		}},
		"the name of an engine leads elsewhere": {func(d *detect.Facts) {
			e := &d.Engines[12]
			e.ID, e.State, e.Why = "decode-0.svc:8000", "down", "no connection: i/o timeout"
			e.Moved = &detect.Moved{From: "10.0.3.10", To: "10.0.9.9", AgoS: 40}
		}, []told{{detect.Bad, "engines", "decode-0.svc:8000",
			"Decode engine decode-0.svc:8000 has another address: its name leads to 10.0.9.9 " +
				"since 40 s ago, and led to 10.0.3.10 before; " +
				"and nothing answers there: no connection: i/o timeout"}}},
		"it has moved, and is up": {func(d *detect.Facts) {
			d.Engines[12].Moved = &detect.Moved{From: "10.0.3.10", To: "10.0.9.9", AgoS: 40}
		}, []told{}},
		"it moved long ago, and is down": {func(d *detect.Facts) {
			d.Engines[12].Moved, d.Engines[12].State = &detect.Moved{From: "10.0.3.10", To: "10.0.9.9", AgoS: 7200}, "down"
		}, []told{{detect.Bad, "engines", "10.0.3.10:8000", "Decode engine 10.0.3.10:8000 is down: no reason is known"}}},
		"a key fills the prefill engines": {func(d *detect.Facts) {
			d.Prefill.Engines[1].State, d.Prefill.Engines[1].KVShare, d.Prefill.Heaviest = "closed", 0.93,
				&detect.Heaviest{Key: "batch", Share: 0.84, Mean: 98_000}
		}, []told{{detect.Warn, "prefill", "10.0.1.11:8000",
			"Prefill engine 10.0.1.11:8000 takes no prompts, because its KV cache is 93 % full: " +
				"84 % of the prompt tokens that prefill engines hold are of API key batch, whose prompts have 98,000 tokens in the mean"}}},
		"nobody prefills": {func(d *detect.Facts) {
			d.Prefill.Engines = d.Prefill.Engines[:1]
			d.Prefill.Engines[0].State = "down"
		}, []told{{detect.Bad, "prefill", "", "No prefill engine takes prompts"},
			{detect.Bad, "prefill", "", "4 requests wait for a prefill engine"}}},
		"ranks that do both prefill, too": {func(d *detect.Facts) {
			d.Prefill.Engines = d.Prefill.Engines[:1]
			d.Prefill.Engines[0].State = "down"
			d.Prefill.Groups = []detect.PrefillGroup{{ID: "main of deepseek-r1 (aggregated)", State: "open"}}
		}, []told{}},
		"engines that are paused are as somebody wants it, and so are requests that wait for them": {func(d *detect.Facts) {
			d.Prefill.Engines = d.Prefill.Engines[:1]
			d.Prefill.Engines[0].State = "down"
			for i := range d.Engines {
				d.Engines[i].State, d.Engines[i].Paused, d.Engines[i].Why = "halted", true,
					"paused through POST /admin/fleet/call (/pause) at 2026-11-27T17:00:00Z"
			}
		}, []told{}},
		"no engine does both any more": {func(d *detect.Facts) {
			d.Prefill.Engines, d.Prefill.Groups = nil, []detect.PrefillGroup{{ID: "main of deepseek-r1 (aggregated)", State: "down"}}
		}, []told{{detect.Bad, "prefill", "", "No aggregated engine takes prompts"},
			{detect.Bad, "prefill", "", "4 requests wait for an aggregated engine"}}},
		"a group that fails": {func(d *detect.Facts) {
			d.Prefill.Groups = []detect.PrefillGroup{{ID: "main of deepseek-r1 (aggregated)", State: "out"}}
		}, []told{{detect.Bad, "ranks", "main of deepseek-r1 (aggregated)",
			"Group main of deepseek-r1 (aggregated) takes no prompts, because earlier ones failed"}}},
		"an aggregated engine drains, once for all of its ranks": {func(d *detect.Facts) {
			d.Models[0].Aggregated, d.Engines[12].Role, d.Engines[12].Draining = true, "aggregated", true
			for i := range 16 {
				rank(d, i).State = detect.RankDraining
			}
		}, []told{{detect.Warn, "engines", "10.0.3.10:8000", "Aggregated engine 10.0.3.10:8000 drains: it takes no new requests"}}},
		"an aggregated rank is full, and requests wait long": {func(d *detect.Facts) {
			d.Models[0].Aggregated, rank(d, 0).KVTokens = true, rank(d, 0).Capacity
			d.Models[0].Pool.OldestS, d.Models[0].Pool.Entries = 31, 7
		}, []told{
			{detect.Bad, "pool", "deepseek-r1", "A request of model deepseek-r1 has waited 31.0 s for a rank, and 7 requests wait in the pool"},
			{detect.Warn, "ranks", "dp", "Rank 10.0.3.10:8000/0 of group dp has a full KV cache"},
		}},
		"the arrival queue is full": {func(d *detect.Facts) { d.Prefill.Waiting = 1000 },
			[]told{{detect.Bad, "prefill", "", "The arrival queue is full: 1,000 requests wait in it, and its limit is 1,000 (prefill.queue.max)"}}},
		"the pool is old": {func(d *detect.Facts) { d.Models[0].Pool.OldestS, d.Models[0].Pool.Entries = 31, 7 },
			[]told{{detect.Bad, "pool", "deepseek-r1",
				"A finished prefill of model deepseek-r1 has waited 31.0 s for a decode rank, and 7 requests wait in the pool"}}},
		"the policy is too slow": {func(d *detect.Facts) { d.Models[0].Groups[0].FallbackRounds = 9 },
			[]told{{detect.Warn, "balance", "dp", "The decode policy of group dp computes for too long at times, and evenkeel decides instead"}}},
		"the policy waits for something": {func(d *detect.Facts) {
			d.Models[0].Groups[0].FallbackRounds, d.Models[0].Groups[0].FallbackReason = 9, "blocked"
		}, []told{{detect.Warn, "balance", "dp", "The decode policy of group dp waits for more than a second at times, and evenkeel decides instead"}}},
		"imbalance costs": {func(d *detect.Facts) { d.Models[0].Groups[0].LostShare = 0.2 },
			[]told{{detect.Warn, "balance", "dp", "Imbalance costs group dp 20 % of every step"}}},
		"it does while a rank drains, as somebody wants it": {func(d *detect.Facts) {
			d.Models[0].Groups[0].LostShare, d.Models[0].Groups[0].Ranks[3].State = 0.2, detect.RankDraining
		}, []told{{detect.Warn, "ranks", "dp", "Decode rank 10.0.3.10:8000/3 of group dp drains: it takes no new requests"}}},
		"a round is never sent": {func(d *detect.Facts) {
			d.Models[0].Groups[0].Held, d.Models[0].Groups[0].Rounds = 3, &board.RoundStatus{HeldS: 10.4, MaxHoldS: 5}
		}, []told{{detect.Bad, "ranks", "dp",
			"3 requests of group dp are held for a round for 10 s, although none may be held for longer than 5 s"}}},
		"one that is late is sent soon": {func(d *detect.Facts) {
			d.Models[0].Groups[0].Held, d.Models[0].Groups[0].Rounds = 3, &board.RoundStatus{HeldS: 9.9, MaxHoldS: 5}
		}, []told{}},
		"the config is refused: what is wrong, without the file's lines": {func(d *detect.Facts) { d.Proxy.ConfigError = "ek.yaml:1:2: wrong\n> 1 | x" },
			[]told{{detect.Warn, "proxy", "", "The config file was refused and is not in force: ek.yaml:1:2: wrong"}}},
		"a source fails and engines are unfit": {func(d *detect.Facts) {
			d.Sources = []detect.Source{
				{Name: "file:a.yaml", Engines: 2, Error: "a.yaml:1:2: wrong\n> 1 | x", Unfit: []detect.Unfit{{"10.0.9.1:8000", "decode", "gives no hand-off"}, {"10.0.9.2:8000", "decode", "is silent"}}},
				{Name: "file:b.yaml", Engines: 1},
			}
		}, []told{
			{detect.Warn, "engines", "file:a.yaml", "Discovery by file:a.yaml fails, and its last list of 2 engines stays in force: a.yaml:1:2: wrong"},
			{detect.Warn, "engines", "file:a.yaml", "2 engines of file:a.yaml are not used: decode engine 10.0.9.1:8000, decode engine 10.0.9.2:8000. The first one is unfit: gives no hand-off"},
		}},
		"nobody owns a group": {func(d *detect.Facts) {
			d.Scopes = []detect.Scope{{Group: "dp", Phase: "watching"}, {Group: "other", Holder: "eu-2"}, {Group: "mine", Admits: true}}
		},
			[]told{{detect.Bad, "geo", "dp", "Group dp has no owner, so that its engines get no requests"}}},
		"a peer is gone": {func(d *detect.Facts) { d.Geo = &detect.Geo{Peers: []detect.Peer{{ID: "us-1", Region: "us"}}} },
			[]told{{detect.Warn, "geo", "us-1", "Peer us-1 in region us is not up: it answered no probe"}}},
	} {
		t.Run(name, func(t *testing.T) {
			d := livetest.New(16).Facts(t.Context())
			tt.change(&d)
			require.Equal(t, tt.want, toldOf(&d))
		})
	}
}

// taken has every slot taken, and so many wait in the pool.
func taken(d *detect.Facts, waiting int) {
	g := &d.Models[0].Groups[0]
	for i := range g.Ranks {
		g.Ranks[i].Used = g.Ranks[i].Slots
	}
	d.Models[0].Pool.Entries, d.Models[0].CrowdedS = waiting, 20
}

// The default group of every model has the same name.
func TestGroupsAreNamedWithTheirModelWhereThereAreSeveral(t *testing.T) {
	group := func(name string, lost float64) detect.Group {
		return detect.Group{GroupLoads: board.GroupLoads{Name: name, Barrier: name != ""}, LostShare: lost}
	}
	d := detect.Facts{Proxy: detect.Proxy{Ready: true}, Models: []detect.Model{
		{Name: "llama", Groups: []detect.Group{group("main", 0.2)}}, {Name: "qwen", Groups: []detect.Group{group("main", 0.3), group("", 0.4)}},
	}}
	where := func() (names []string) {
		for _, p := range toldOf(&d) {
			names = append(names, p.where)
		}
		return names
	}
	require.Equal(t, []string{"llama · main", "qwen · main", "qwen"}, where())
	var b detect.Book
	for range 3 {
		b.Observe(time.Unix(1, 0), detect.Find(&d, detect.Ended{All: 6000, Failed: 1200}))
		require.Len(t, b.Incidents(), 3)
	}
	d.Models = d.Models[1:]
	require.Equal(t, []string{"qwen · main", "qwen"}, where())
	d.Models[0].Groups = d.Models[0].Groups[:1]
	require.Equal(t, []string{"main"}, where())
}
