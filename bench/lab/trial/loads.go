package trial

import (
	"fmt"
	"math"
	"math/rand/v2"
	"time"

	"evenkeel/bench/lab/trace"
)

// Lengths are drawn log-normally, in tokens.
type Lengths struct {
	Median float64 `json:"median"`
	Sigma  float64 `json:"sigma"` // deviation of the logarithm
	Most   int     `json:"most"`
}

func (l Lengths) draw(r *rand.Rand) int {
	return int(min(float64(l.Most), max(2, l.Median*math.Exp(l.Sigma*r.NormFloat64()))))
}

// Load is requests of one kind.
type Load struct {
	Name     string  `json:"name"`
	Prompt   Lengths `json:"prompt"`
	Output   Lengths `json:"output"`
	InFlight int     `json:"in_flight,omitempty"`     // a closed loop has so many requests at any time
	Share    float64 `json:"share_of_rate,omitempty"` // an open loop sends this share of the rate that the closed one before it had
}

// Next draws the lengths of a request.
func (l *Load) Next(r *rand.Rand, _ float64) trace.Request {
	return trace.Request{Prompt: l.Prompt.draw(r), Output: l.Output.draw(r)}
}

// Open says whether requests come at times of their own.
func (l *Load) Open() bool { return l.InFlight == 0 }

func (l *Load) String() string {
	how := fmt.Sprintf("%d in flight", l.InFlight)
	if l.Open() {
		how = fmt.Sprintf("an open loop at %.0f %% of what was served before", 100*l.Share)
	}
	return fmt.Sprintf("prompts of about %.0f tokens (up to %d), answers of about %.0f (up to %d), %s",
		l.Prompt.Median, l.Prompt.Most, l.Output.Median, l.Output.Most, how)
}

// most is how many requests per rank are in flight at most, whatever the engine takes: clients and
// proxy share a machine.
const most = 128

// Loads are the four, of a size that suits the ranks. The short form has short texts. An open load
// follows the closed one whose rate it takes.
func Loads(e *Engine, short bool) []*Load {
	all := []*Load{
		{Name: "chat, closed loop", Prompt: Lengths{600, 0.9, 8000}, Output: Lengths{150, 0.6, 600}},
		{Name: "chat, open loop", Prompt: Lengths{600, 0.9, 8000}, Output: Lengths{150, 0.6, 600}, Share: 0.75},
		{Name: "unequal prompts, short answers", Prompt: Lengths{1500, 1.4, 24_000}, Output: Lengths{30, 0.5, 100}},
		{Name: "short prompts, long answers", Prompt: Lengths{100, 0.5, 400}, Output: Lengths{400, 0.5, 1200}},
	}
	fits := math.MaxInt
	if e.Context > 0 {
		fits = e.Context
	}
	if e.Room > 0 {
		fits = min(fits, int(e.Room)*9/10)
	}
	for i, l := range all {
		if short {
			for _, x := range []*Lengths{&l.Prompt, &l.Output} {
				x.Median, x.Most = max(4, x.Median/10), max(8, x.Most/10)
			}
		}
		l.Output.Most = min(l.Output.Most, max(2, fits/4))
		l.Prompt.Most = min(l.Prompt.Most, max(2, (fits-l.Output.Most)*9/10)) // a tokenizer may count a few more
		if l.Share == 0 {
			l.InFlight = l.inFlight(e, []float64{0.75, 0, 0.25, 0.9}[i])
		}
	}
	return all
}

// inFlight is a share of the slots, or of the requests that the ranks have KV room for.
func (l *Load) inFlight(e *Engine, share float64) int {
	n := float64(e.Ranks*min(e.Slots, most)) * share
	if e.Room > 0 {
		prompt, output := l.means()
		n = min(n, 0.8*float64(e.Room)*float64(e.Ranks)/(prompt+output))
	}
	return max(1, int(n))
}

// draw is a list of requests. An open one has so many per second.
func (l *Load) draw(seed uint64, n int, rate float64) []trace.Request {
	r := rand.New(rand.NewPCG(seed, 1))
	list, at := make([]trace.Request, n), 0.0
	for i := range list {
		list[i] = l.Next(r, 0)
		if l.Open() {
			list[i].At = time.Duration(at * float64(time.Second))
			at += r.ExpFloat64() / rate
		}
	}
	return list
}

// means are those of the lengths, by some that are drawn.
func (l *Load) means() (prompt, output float64) {
	const sample = 4000
	r := rand.New(rand.NewPCG(1, 1))
	for range sample {
		q := l.Next(r, 0)
		prompt, output = prompt+float64(q.Prompt)/sample, output+float64(q.Output)/sample
	}
	return prompt, output
}
