package prefill

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"evenkeel/prefill/ledger"
	"evenkeel/prefill/policy"
)

// Validate reports every setting that cannot work, also those that are not in the config file. A
// zero field stands for its default.
func (c Config) Validate() error {
	c = c.withDefaults()
	var errs []error
	bad := func(key, format string, args ...any) {
		err := fmt.Errorf("prefill."+key+": "+format, args...)
		if key == "policy" { // callers recognise ErrBadPolicy
			err = fmt.Errorf("%w: "+format, append([]any{ErrBadPolicy}, args...)...)
		}
		errs = append(errs, err)
	}
	c.Check(bad)
	if c.Scrape.Interval > 0 && c.Scraper == nil {
		bad("scrape.interval", "%v, but there is no scraper; write 0s", c.Scrape.Interval)
	}
	return errors.Join(errs...)
}

// Check calls bad for every setting of the config file that cannot work; key is below prefill. It
// does not judge settings that depend on the engines.
func (c *Config) Check(bad func(key, format string, args ...any)) {
	c.checkPolicies(bad)
	switch c.Index.Tokenize {
	case TokenizeOff, TokenizeEngine:
	case tokenizeLocal:
		bad("index.tokenize", "local: this build has no tokenizer; write engine, which asks a prefill engine's /tokenize, or off")
	default:
		bad("index.tokenize", "%q tells no token ids; write off or engine", c.Index.Tokenize)
	}
	if c.Index.TokenizeTimeout <= 0 {
		bad("index.tokenize_timeout", "%v; write how long a request may wait for its token ids, such as 250ms", c.Index.TokenizeTimeout)
	}
	for key, port := range map[string]int{"port": c.KVEvents.Port, "replay_port": c.KVEvents.ReplayPort} {
		if port < 0 || port > 65535 || port == 0 && key == "port" { // a replay_port of 0: no replays
			bad("kv_events."+key, "%d is no port; write the one in the engines' --kv-events-config", port)
		}
	}
	for key, v := range map[string]float64{"tp_ms": c.Calibration.TPMs, "t0_ms": c.Calibration.T0Ms, "beta2_ms": c.Calibration.Beta2} {
		if !(v >= 0) { // negated, here and below, so that NaN is refused
			bad("calibration."+key, "%v; write what was measured, or 0 to have it learned", v)
		}
	}
	if !(c.KVThreshold > ledger.Hysteresis && c.KVThreshold <= 1) {
		bad("kv_threshold", "%v is no share of a KV cache at which to stop; write a number up to 1, such as 0.9", c.KVThreshold)
	}
	if !(c.Retry.Budget > 0 && c.Retry.Budget <= 1) {
		bad("retry.budget", "%v is no share of requests; write a number above 0 and up to 1, and attempts: 1 for no retries", c.Retry.Budget)
	}
	if c.Scrape.Interval < 0 {
		bad("scrape.interval", "%v is negative; write 0s or more", c.Scrape.Interval)
	}
	for key, d := range map[string]time.Duration{
		"scrape.timeout": c.Scrape.Timeout, "queue.timeout": c.Queue.Timeout, "queue.batch_timeout": c.Queue.BatchTimeout,
		"retry.base": c.Retry.Base,
	} {
		if d <= 0 {
			bad(key, "%v; a time above 0 is needed", d)
		}
	}
	if c.Retry.Base > maxRetryBase {
		bad("retry.base", "%v is too long for the first pause of a request between two attempts; write %v or less",
			c.Retry.Base, maxRetryBase)
	}
	least := func(key string, n, bound int) {
		if n < bound {
			bad(key, "%d; at least %d is needed", n, bound)
		}
	}
	least("queue.max", c.Queue.Max, 1)
	least("push.max_unanswered", c.Push.MaxUnanswered, 1)
	least("index.max_bytes", int(c.Index.MaxBytes), 1<<20)
	least("retry.attempts", c.Retry.Attempts, 1)
}

func (c *Config) checkPolicies(bad func(key, format string, args ...any)) {
	switch {
	case c.Work == "tokens":
	case c.Work != "vllm-ascend":
		bad("work", "%q weighs nothing; write tokens or vllm-ascend", c.Work)
	case c.Policy != "least-tokens":
		bad("work", "only policy least-tokens weighs work, and the policy is %s; remove it, or write policy: least-tokens", c.Policy)
	}
	library, err := policy.NewLibrary(c.Policies)
	if err != nil {
		for _, mistake := range flatten(err) {
			var inDefinition *policy.DefinitionError
			if !errors.As(mistake, &inDefinition) {
				bad("policies", "%v", mistake)
				continue
			}
			key := "policies." + inDefinition.Policy + "." + inDefinition.Key
			key = strings.TrimSuffix(key, ".name") // a bad name is reported at the policy itself
			bad(key, "%s", inDefinition.Where())
		}
		return
	}
	library.ForServing = c.Clock == nil // a simulation may use every policy
	if _, err := library.Parse(c.Policy); err != nil {
		bad("policy", "%v", err)
	}
}

func flatten(err error) (all []error) {
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return []error{err}
	}
	for _, e := range joined.Unwrap() {
		all = append(all, flatten(e)...)
	}
	return all
}
