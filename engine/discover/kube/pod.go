package kube

import (
	"cmp"
	"fmt"
	"net"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"evenkeel/engine/discover"
)

// Annotations of a pod, which override the source's config.
const (
	prefix = "evenkeel.io/"

	annPort, annProfile, annRegion           = prefix + "port", prefix + "profile", prefix + "region"
	annGroup, annBarrier, annRanks, annSlots = prefix + "group", prefix + "barrier", prefix + "ranks", prefix + "slots"
	annKVTokens, annCost                     = prefix + "kv-tokens", prefix + "cost"
	annFirstRank                             = prefix + "first-rank"
	annBudget, annInterval                   = prefix + "token-budget", prefix + "prefill-schedule-interval"
	annEventsPort, annReplayPort             = prefix + "kv-events-port", prefix + "kv-replay-port"
)

// both: a pod is a prefill engine and a decode engine.
const both = "both"

// slicesState: a field is true if at least one EndpointSlice says so.
type slicesState struct{ terminating, notServing bool }

// statesBySlices is by pod UID.
func statesBySlices(slices []*discoveryv1.EndpointSlice) map[string]slicesState {
	all := map[string]slicesState{}
	for _, s := range slices {
		for _, e := range s.Endpoints {
			if e.TargetRef == nil || e.TargetRef.Kind != "Pod" {
				continue
			}
			uid := string(e.TargetRef.UID)
			before := all[uid]
			conditions := e.Conditions
			serving := conditions.Serving
			if serving == nil { // it is optional; then Ready counts
				serving = conditions.Ready
			}
			all[uid] = slicesState{
				terminating: before.terminating || conditions.Terminating != nil && *conditions.Terminating,
				// Without a value, the pod serves.
				notServing: before.notServing || serving != nil && !*serving,
			}
		}
	}
	return all
}

// engines has one for each port and role. The address of a pod that has ended may belong to another
// pod by now.
func (c *Config) engines(pod *corev1.Pod, bySlices slicesState) ([]discover.Engine, error) {
	hasEnded := pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
	if pod.Status.PodIP == "" || hasEnded {
		return nil, nil
	}
	roles, err := c.roles(pod)
	if err != nil {
		return nil, err
	}
	ports, err := portsOf(pod, cmp.Or(pod.Annotations[annPort], c.Port))
	if err != nil {
		return nil, err
	}
	attributes, err := c.attributes(pod)
	if err != nil {
		return nil, err
	}
	e := discover.Engine{Incarnation: string(pod.UID), Attributes: attributes}
	switch {
	case pod.DeletionTimestamp != nil || bySlices.terminating:
		e.Away = discover.Leaving
	case bySlices.notServing || !isReady(pod):
		e.Away = discover.NotReady
	}
	var list []discover.Engine
	for _, port := range ports {
		e.Address = net.JoinHostPort(pod.Status.PodIP, strconv.Itoa(port))
		e.URL = cmp.Or(c.Scheme, "http") + "://" + e.Address
		for _, role := range roles {
			e.Role = role
			list = append(list, withAttributesOfRole(e)) // the attributes are for all roles
		}
	}
	return list, nil
}

func withAttributesOfRole(e discover.Engine) discover.Engine {
	switch a := &e.Attributes; e.Role {
	case discover.Prefill:
		a.Group, a.Barrier, a.Slots, a.KVTokens, a.Cost = "", "", 0, 0, 0
	case discover.Decode:
		a.KVEventsPort, a.KVReplayPort = 0, 0
	}
	if e.Role != discover.Aggregated { // they describe steps in which an engine prefills and decodes
		e.Budget, e.Interval = 0, 0
	}
	return e
}

func (c *Config) roles(pod *corev1.Pod) ([]string, error) {
	switch role := cmp.Or(c.Role, pod.Labels[c.RoleLabel]); role {
	case discover.Prefill, discover.Decode, discover.Aggregated:
		return []string{role}, nil
	case both:
		return []string{discover.Prefill, discover.Decode}, nil
	default:
		return nil, fmt.Errorf("its label %s is %q; write prefill, decode, both or aggregated there, or set role of the source", c.RoleLabel,
			role)
	}
}

// portsOf reads numbers or names of container ports, separated by commas.
func portsOf(pod *corev1.Pod, spec string) (ports []int, err error) {
	for name := range strings.SplitSeq(spec, ",") {
		name = strings.TrimSpace(name)
		port, err := strconv.Atoi(name)
		if err != nil { // not a number
			port = namedPort(pod, name)
		}
		if port < 1 || port > 65535 { // 0: no container port has this name
			return nil, fmt.Errorf("port %q is neither a number nor the name of one of its container ports", name)
		}
		ports = append(ports, port)
	}
	return ports, nil
}

func namedPort(pod *corev1.Pod, name string) int {
	// Sidecars are init containers, too.
	for _, list := range [][]corev1.Container{pod.Spec.Containers, pod.Spec.InitContainers} {
		for _, c := range list {
			for _, p := range c.Ports {
				if p.Name == name {
					return int(p.ContainerPort)
				}
			}
		}
	}
	return 0
}

// isReady is false without the condition.
func isReady(pod *corev1.Pod) bool {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

func (c *Config) attributes(pod *corev1.Pod) (discover.Attributes, error) {
	a, annotations := c.Attributes, pod.Annotations
	a.Profile, a.Region = cmp.Or(annotations[annProfile], a.Profile), cmp.Or(annotations[annRegion], a.Region)
	a.Group, a.Barrier = cmp.Or(annotations[annGroup], a.Group), cmp.Or(annotations[annBarrier], a.Barrier)
	kvTokens := int(a.KVTokens)
	for name, into := range map[string]*int{
		annRanks: &a.Ranks, annFirstRank: &a.FirstRank, annSlots: &a.Slots, annKVTokens: &kvTokens, annEventsPort: &a.KVEventsPort,
		annReplayPort: &a.KVReplayPort, annBudget: &a.Budget, annInterval: &a.Interval,
	} {
		if text, ok := annotations[name]; ok {
			n, err := strconv.Atoi(text)
			if err != nil || n < 0 {
				return a, fmt.Errorf("its annotation %s is %q; write a whole number", name, text)
			}
			*into = n
		}
	}
	a.KVTokens = int64(kvTokens)
	if text, ok := annotations[annCost]; ok {
		n, err := strconv.ParseFloat(text, 32)
		if err != nil || !(n > 0) { // refuses NaN, too
			return a, fmt.Errorf("its annotation %s is %q; write a number above 0", annCost, text)
		}
		a.Cost = float32(n)
	}
	return a, nil
}
