package policy

import (
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/internal/namedargs"
)

func TestParse(t *testing.T) {
	for _, c := range []struct{ name, spec, want string }{
		{"a name alone is the policy with its defaults", "br0", "br0"},
		{"settings follow a colon", "br0:window=4,theta=0", "br0:window=4,theta=0"},
		{"or a comma", "br0,window=4", "br0:window=4"},
		{"or a preset", "br0:paper,window=16", "br0:paper,window=16"},
		{"the canonical name has one order", "br0:watermark=0.1,queue=capacity,window=9", "br0:window=9,queue=capacity,watermark=0.1"},
		{"and leaves defaults out", "br0:window=8,theta=G,order=fcfs,max_age_ms=30000", "br0"},
		{"numbers read alike are written alike", "pjsq-kv:max_age_ms=3e3,watermark=0.050", "pjsq-kv:max_age_ms=3000"},
		{"the bypass has a margin of its own", "br0:bypass,margin=0", "br0:bypass,margin=0"},
		{"random policies take a seed", "p2c:seed=9", "p2c:seed=9"},
		{"a horizon may follow the outputs", "brh:horizon=auto,gamma=auto", "brh:gamma=auto"},
		{"or not", "brh:beta=8,horizon=16,predictor=exact,tau=0.7,every=10,decrement_anchor=true", "brh:horizon=16,beta=8,predictor=exact,tau=0.7,every=10,decrement_anchor=true"},
		{"the paper's form has its own defaults", "brh:paper,horizon=80,gamma=0.8", "brh:paper,gamma=0.8"},
		{
			"evenkeel with all that differs", "evenkeel:requests=false,budget=1000,kappa=0.5,age_weight=0",
			"evenkeel:budget=1000,kappa=0.5,age_weight=0,requests=false",
		},
		{
			"and with its defaults", "evenkeel:budget=4000,kappa=0.6,ahead=true,age_weight=auto,max_age_ms=30000,watermark=0.05",
			"evenkeel",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, err := Parse(c.spec)
			require.NoError(t, err)
			require.Equal(t, c.want, p.Name())
		})
	}
}

func TestParseSaysWhatIsWrong(t *testing.T) {
	const there = "there are br0, br0:paper, br0:bypass, brh, brh:paper, evenkeel, random, prandom, rr, prr, p2c, pp2c, jsq, pjsq, jsq-kv, " +
		"pjsq-kv"
	for _, c := range []struct{ name, spec, want string }{
		{"an unknown policy", "fifo", `unknown policy "fifo"; ` + there},
		{"an unknown preset", "br0:papr", `unknown policy "br0:papr" (did you mean "br0:paper"?); ` + there},
		{"nothing", "", `unknown policy ""; ` + there},
		{"an unknown key", "br0:windw=4", "policy br0: unknown key \"windw\" (did you mean \"window\"?); it takes window, theta, queue, order, max_age_ms, ahead, watermark"},
		{"a key of another preset", "br0:bypass,window=4", "policy br0:bypass: unknown key \"window\"; it takes margin, max_age_ms, watermark"},
		{"a key where there are none", "jsq:seed=1", "policy jsq: unknown key \"seed\"; it takes none"},
		{"a key without value", "br0,window", `policy br0: "window" is no setting; write key=value`},
		{"a key twice", "br0:window=4,window=5", "policy br0: window is set twice"},
		{"a window of nothing", "br0:window=0", "policy br0: window=0: want a whole number from 1 to 64"},
		{"a word for a number", "br0:theta=all", "policy br0: theta=all: want G, the number of workers, or a whole number from 0"},
		{"a word that is no choice", "br0:queue=slots", "policy br0: queue=slots: want margin or capacity"},
		{"a negative age", "br0:max_age_ms=-1", "policy br0: max_age_ms=-1: want milliseconds, 0 turns the guard off"},
		{"a share that is no number", "br0:watermark=NaN", "policy br0: watermark=NaN: want the share of KV capacity kept empty, from 0 to 0.9"},
		{"a horizon beyond all use", "brh:horizon=9999", "policy brh: horizon=9999: want auto or a whole number of steps from 0 to 512"},
		{"a discount that grows", "brh:gamma=1.1", "policy brh: gamma=1.1: want auto or a number from 0 to 1"},
		{"a weight without bounds", "brh:beta=Inf", "policy brh: beta=Inf: want a number from 0 to 1000000"},
		{"an unknown predictor", "brh:predictor=magic", "policy brh: predictor=magic: want none, survival, exact, oracle"},
		{"a word for yes or no", "brh:decrement_anchor=1", "policy brh: decrement_anchor=1: want false or true"},
		{"what the paper's form decides itself", "brh:paper,queue=margin", "policy brh:paper: unknown key \"queue\"; it takes window, theta, order, horizon, alpha, beta, gamma, predictor, tau, every, watermark"},
		{"a negative seed", "random:seed=-1", "policy random: seed=-1: want a whole number from 0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := Parse(c.spec)
			require.EqualError(t, err, c.want)
		})
	}
}

func TestAListIsSplitAtPolicies(t *testing.T) {
	for _, c := range []struct {
		name, list string
		want       []string
	}{
		{"names", "jsq,jsq-kv,br0", []string{"jsq", "jsq-kv", "br0"}},
		{"a setting belongs to the policy on its left", "jsq,br0:window=4,theta=0,rr", []string{"jsq", "br0:window=4,theta=0", "rr"}},
		{"also to a preset", "br0:paper,window=4,br0", []string{"br0:paper,window=4", "br0"}},
		{"and to a bare name", "p2c,seed=2,jsq", []string{"p2c,seed=2", "jsq"}},
		{"a colon before the = starts a policy", "br0:window=4,br0:window=5", []string{"br0:window=4", "br0:window=5"}},
		{"a colon after it does not", "br0,order=x:y", []string{"br0,order=x:y"}},
		{"spaces do not count", "jsq, br0", []string{"jsq", "br0"}},
	} {
		t.Run(c.name, func(t *testing.T) { require.Equal(t, c.want, namedargs.List(c.list)) })
	}
	all, err := parseList("jsq,br0:window=4,theta=0,pjsq-kv")
	require.NoError(t, err)
	require.Len(t, all, 3)
	require.Equal(t, "br0:window=4,theta=0", all[1].Name())
	_, err = parseList("jsq,")
	require.ErrorContains(t, err, `unknown policy ""`)
}

func TestSpecKnowsWhatIsSet(t *testing.T) {
	sp, err := ParseSpec("br0:paper,window=4")
	require.NoError(t, err)
	require.True(t, sp.Sets("window"))
	require.True(t, sp.Sets("queue"), "by the preset")
	require.False(t, sp.Sets("theta"))
	require.False(t, sp.Accepts("queue"), "the preset decides it")
	other, err := sp.With("theta", "3")
	require.NoError(t, err)
	require.Equal(t, "br0:paper,window=4,theta=3", other.String())
	require.Equal(t, "br0:paper,window=4", sp.String(), "With leaves its receiver alone")
}

func TestGuardAges(t *testing.T) {
	for spec, want := range map[string]float32{"br0": 30_000, "br0:max_age_ms=5": 5, "br0:paper": 0, "brh": 30_000, "brh:paper": 0,
		"evenkeel": 30_000, "jsq": 0, "pjsq": 30_000, "br0:bypass": 30_000} {
		p, err := Parse(spec)
		require.NoError(t, err)
		require.Equal(t, want, p.MaxAgeMs(), spec)
	}
}

func FuzzParse(f *testing.F) {
	for _, name := range Names() {
		f.Add(name)
	}
	f.Add("br0:window=4,theta=G,queue=capacity,order=desc,max_age_ms=1e3,watermark=.1")
	f.Add("br0:paper,window=64")
	f.Add("brh:horizon=auto,alpha=0.5,gamma=auto,predictor=exact,decrement_anchor=true")
	f.Add("evenkeel:max_hold=1,kappa=0.2")
	f.Add("random,seed=18446744073709551615")
	f.Fuzz(func(t *testing.T, spec string) {
		p, err := Parse(spec)
		if err != nil {
			return
		}
		again, err := Parse(p.Name())
		require.NoError(t, err, "the canonical name of %q", spec)
		require.Equal(t, p.Name(), again.Name())
		require.Equal(t, p.MaxAgeMs(), again.MaxAgeMs())
		require.Equal(t, Watermark(p), Watermark(again))
		require.Equal(t, RequirementsOf(p, 0), RequirementsOf(again, 0))
		all, err := parseList("jsq," + p.Name() + ",rr")
		require.NoError(t, err)
		require.Len(t, all, 3)
	})
}

// parseList makes the policies of a list.
func parseList(list string) ([]Policy, error) {
	texts := namedargs.List(list)
	all := make([]Policy, len(texts))
	for i, text := range texts {
		p, err := Parse(text)
		if err != nil {
			return nil, err
		}
		all[i] = p
	}
	return all, nil
}
