package mixed

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"evenkeel/bench/lab/laws"
	"evenkeel/bench/lab/trace"
	"evenkeel/bench/sim/draw"
	"evenkeel/dispatcher/step"
)

// Load is requests, and the ranks that serve them.
type Load struct {
	Number int
	Texts  Texts
	Chats  float64 // share of requests that go on with an earlier chat; 0: there are none
	Ranks  int
	Slots  int
	Room   int64 // KV tokens of a rank; 0: unlimited
	Budget int32
	Law    step.Law
	Of     string  // deployment that has the law; empty: the law is drawn from what is published
	Rho    float64 // open loop: requests, as a share of what ranks could do that are always level; 0: closed
	Full   float64 // closed loop: requests that are there, as a share of the slots

	Seed  uint64
	There int     // requests at a time, about
	Stays float64 // a request's time in the mean where all slots are full, ms
	Gap   float64 // between requests, ms

	// fastest is how many requests of a closed loop leave in a ms at most. Where slots are free, steps
	// are shorter than the Gap assumes.
	fastest float64
}

// Texts are how long prompts and answers are.
type Texts interface {
	// Next draws one of each, at a share of the run.
	Next(r *rand.Rand, at float64) trace.Request
	String() string
}

// request is one of a load.
type request struct {
	at      float64 // ms; of a closed loop only for the first ones
	prompt  int32
	output  int32
	chat    int32   // the same number: the same chat
	shared  int32   // tokens of its prompt that the turn before it had or got
	guessed float64 // a proxy takes its prompt to be so many times as long as it is
	late    float64 // from the proxy to the engine's queue, ms
}

// The ranges. What spans more than a factor of four is drawn by its logarithm.
const (
	ranksFrom, ranksTo  = 2, 32
	slotsFrom, slotsTo  = 16, 64
	budgetFrom, budgets = 2048, 4 // 2048 times 1, 2, 4, 8
	c0From, c0To        = 8, 60   // ms
	kvFrom, kvTo        = 0.005e-3, 0.25e-3
	requestFrom, reqTo  = 0.02, 0.6
	tokenFrom, tokenTo  = 0.060, 0.340
	ownFrom, ownTo      = 0.10, 0.40 // of what a request and a token of a prompt cost
	anyTo               = 20
	fullFrom, fullTo    = 0.5, 1.2
	rhoFrom, rhoTo      = 0.3, 0.95
	roomFrom, roomTo    = 0.6, 1.2 // in half of the loads, of what the slots hold in the mean
	chatsFrom, chatsTo  = 0.3, 0.9 // in half of the loads
	lateFrom, lateTo    = 2, 20
	guessed             = 0.3 // deviation of the logarithm
	longestPrompt       = 128_000
)

// Draw draws one whose every property is random. Loads of even numbers have the law of a
// deployment, of those that bench/lab/laws has with as many ranks.
func Draw(seed uint64, number int) *Load {
	return draws(seed, number, func(d dice, l *Load) {
		request, token, own := d.logarithm(requestFrom, reqTo), d.logarithm(tokenFrom, tokenTo), d.between(ownFrom, ownTo)
		l.Law.Model = step.Model{
			C0Ms: d.logarithm(c0From, c0To), C1Ms: d.logarithm(kvFrom, kvTo), RequestMs: own * request,
			OwnPromptMs: own * token, SharedPromptMs: (1 - own) * token, PrefillMs: d.between(0, anyTo),
		}
		l.Law.MeanRowsMs = (1 - own) * request
		if all := deployments(); number%2 == 0 {
			l.servedBy(&all[d.IntN(len(all))])
		}
	})
}

// Served draws one whose every property is random, but it is served by this deployment.
func Served(seed uint64, number int, e *laws.Entry) *Load {
	return draws(seed, number, func(_ dice, l *Load) { l.servedBy(e) })
}

// servedBy has the ranks of a deployment serve the load.
func (l *Load) servedBy(e *laws.Entry) {
	l.Of, l.Ranks, l.Law = e.Name(), e.Ranks, e.Served()
}

// DrawDense draws one whose prompts are mostly the work of their own ranks, and whose requests cost
// nothing in half of the loads: as on engines whose models have few experts or none.
func DrawDense(seed uint64, number int) *Load {
	return draws(seed, number, func(d dice, l *Load) {
		token, shared := d.between(0.080, 0.160), d.between(0.25, 0.55)
		l.Law.Model = step.Model{
			C0Ms: d.logarithm(10, 60), C1Ms: d.logarithm(0.02e-3, 0.3e-3), RequestMs: d.half(d.logarithm(0.05, 0.4)),
			OwnPromptMs: token * (1 - shared), SharedPromptMs: token * shared, PrefillMs: d.between(0, anyTo),
		}
	})
}

// dice are what properties are drawn with.
type dice struct{ *rand.Rand }

func (d dice) between(from, to float64) float64 { return from + (to-from)*d.Float64() }

func (d dice) logarithm(from, to float64) float64 { return from * math.Pow(to/from, d.Float64()) }

// half is x in half of the loads, else 0.
func (d dice) half(x float64) float64 {
	if d.IntN(2) == 0 {
		return 0
	}
	return x
}

// draws draws one with a law of its own.
func draws(seed uint64, number int, law func(d dice, l *Load)) *Load {
	d := dice{rand.New(rand.NewPCG(seed, uint64(number)))}
	texts := draw.NewTexts(d.Rand)
	l := &Load{Number: number, Texts: &texts}
	l.Chats = d.half(d.between(chatsFrom, chatsTo))
	l.Ranks = int(math.Round(d.logarithm(ranksFrom, ranksTo)))
	l.Slots = int(math.Round(d.between(slotsFrom, slotsTo)))
	l.Budget = budgetFrom << d.IntN(budgets)
	law(d, l)
	if l.Rho = d.half(d.between(rhoFrom, rhoTo)); l.Rho == 0 {
		l.Full = d.between(fullFrom, fullTo)
	}
	room := d.half(d.between(roomFrom, roomTo))
	l.Seed = d.Uint64()
	l.Measure(room)
	return l
}

// deployments are those whose laws are drawn: CUDA graphs, and as many ranks as loads have.
var deployments = sync.OnceValue(func() []laws.Entry {
	return slices.DeleteFunc(laws.All(), func(e laws.Entry) bool {
		return !e.Graphs || e.Prompt.Fit.Steps == 0 || e.Ranks < ranksFrom || e.Ranks > ranksTo
	})
})

// Measure finds how long requests stay and how many the ranks can serve, from some of them. With a
// share of what the slots hold in the mean, it sets the room to that.
func (l *Load) Measure(room float64) {
	const n = 4000
	var prompts, outputs, resident, longest float64
	l.There = l.Ranks * l.Slots
	for _, q := range l.requests(n, 0) {
		o := float64(q.output)
		prompts += float64(q.prompt-q.shared) / n
		outputs += o / n
		resident += (float64(q.prompt) + o/2) * o / n
		longest = max(longest, float64(q.prompt)+o)
	}
	resident /= outputs // KV tokens of a request that decodes, in the mean
	slots := float64(l.Slots)
	if room > 0 {
		l.Room = int64(max(1.06*longest, room*slots*resident))
	}
	if l.Room > 0 {
		slots = max(1, min(slots, float64(l.Room)/resident))
	}
	level := l.Law.Level()
	ms := level.C0Ms + slots*(level.RequestMs+level.C1Ms*resident)
	g := float64(l.Ranks)
	each := outputs*ms/(g*slots) + prompts*(l.Law.OwnPromptMs+l.Law.SharedPromptMs)/g // ms of the group for each request
	l.Stays = each * g * slots
	l.Gap = each / max(l.Rho, 1e-9)
	if l.Rho == 0 {
		l.There = max(1, int(math.Round(l.Full*float64(l.Ranks*l.Slots))))
		l.Gap = l.Stays / float64(l.There)
		taken := max(1, min(slots, float64(l.There)/g)) // slots of each rank, if all are level
		step := level.C0Ms + taken*(level.RequestMs+level.C1Ms*resident)
		l.fastest = 1.25 / (outputs*step/min(float64(l.There), g*slots) + prompts*(l.Law.OwnPromptMs+l.Law.SharedPromptMs)/g)
	} else {
		l.There = int(l.Rho * g * slots)
	}
}

// For is the load, played for so long.
func (l *Load) For(d time.Duration) *Load {
	so := *l
	so.Stays = float64(d.Milliseconds()) / (settles + lasts)
	return &so
}

// Requests are the first n, for who serves them elsewhere. That some go on with chats is not told.
func (l *Load) Requests(n int) []trace.Request {
	all := make([]trace.Request, n)
	for i, q := range l.requests(n, l.Gap) {
		all[i] = trace.Request{At: time.Duration(q.at * float64(time.Millisecond)), Prompt: int(q.prompt), Output: int(q.output)}
	}
	return all
}

// requests draws the first n, gap ms apart in the mean.
func (l *Load) requests(n int, gap float64) []request {
	r := rand.New(rand.NewPCG(l.Seed, 1))
	all := make([]request, n)
	var open []int32 // the last turns of chats that go on, oldest first
	at := 0.0
	for i := range all {
		q := &all[i]
		fresh := l.Texts.Next(r, float64(i)/float64(n))
		goes, on, late, guess := r.Float64() < l.Chats, r.IntN(4) > 0, r.Float64(), r.NormFloat64()
		*q = request{prompt: int32(fresh.Prompt), output: int32(fresh.Output), chat: int32(i), late: lateFrom + (lateTo-lateFrom)*late}
		if goes && len(open) > 0 && i-int(open[0]) > l.There { // an earlier turn has probably been answered
			before := &all[open[0]]
			open = open[1:]
			if long := before.prompt + before.output + q.prompt/4 + 1; long <= longestPrompt {
				q.chat, q.shared, q.prompt = before.chat, before.prompt+before.output, long
			}
		}
		if on {
			open = append(open, int32(i))
		}
		q.guessed = math.Exp(guessed*guess - guessed*guessed/2)
		at += gap * r.ExpFloat64()
		q.at = at
	}
	return all
}

func (l *Load) String() string {
	how := fmt.Sprintf("closed, %.2f of the slots", l.Full)
	if l.Rho > 0 {
		how = fmt.Sprintf("open, rho %.2f", l.Rho)
	}
	law := "a published law"
	if l.Of != "" {
		law = l.Of
	}
	return fmt.Sprintf("%d: %s, %d ranks of %d slots, %s, %s, %.0f %% go on, budget %d, c0 %.0f ms",
		l.Number, law, l.Ranks, l.Slots, how, l.Texts.String(), 100*l.Chats, l.Budget, l.Law.C0Ms)
}
