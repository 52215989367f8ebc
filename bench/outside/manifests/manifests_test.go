// Package manifests renders what configs/kubernetes has, as kustomize and helm do, and checks it.
package manifests

import (
	"bytes"
	gojson "encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/stretchr/testify/require"
	apps "k8s.io/api/apps/v1"
	autoscaling "k8s.io/api/autoscaling/v2"
	core "k8s.io/api/core/v1"
	flowcontrol "k8s.io/api/flowcontrol/v1"
	networking "k8s.io/api/networking/v1"
	disruption "k8s.io/api/policy/v1"
	rbac "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"

	"evenkeel/gateway"
	"evenkeel/gateway/config"
)

const manifests = "../../../configs/kubernetes"

// manifest is what a folder describes.
type manifest struct {
	proxy    *apps.StatefulSet
	engines  []*apps.StatefulSet
	configs  []*core.ConfigMap
	services []*core.Service
	policies []*networking.NetworkPolicy
	budgets  []*disruption.PodDisruptionBudget
	accounts []*core.ServiceAccount
	roles    []*rbac.Role
	bindings []*rbac.RoleBinding
}

// documents are what kubectl apply -k or helm would send.
func documents(t *testing.T, folder string) (all [][]byte) {
	t.Helper()
	if folder == "chart" {
		return rendered(t, nil)
	}
	made, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), filepath.Join(manifests, folder))
	require.NoError(t, err)
	for _, r := range made.Resources() {
		text, err := r.AsYAML()
		require.NoError(t, err)
		all = append(all, text)
	}
	return all
}

// object reads a document as strictly as an API server reads.
func object(t *testing.T, document []byte) runtime.Object {
	t.Helper()
	decoder := json.NewSerializerWithOptions(json.DefaultMetaFactory, scheme.Scheme, scheme.Scheme,
		json.SerializerOptions{Yaml: true, Strict: true})
	o, _, err := decoder.Decode(document, nil, nil)
	require.NoError(t, err, string(document))
	return o
}

// applied is all that a folder describes.
func applied(t *testing.T, folder string) *manifest {
	t.Helper()
	m := &manifest{}
	for _, d := range documents(t, folder) {
		m.add(t, object(t, d))
	}
	return m
}

// each runs a test for the Kustomize base and for the Helm chart.
func each(t *testing.T, test func(*testing.T, *manifest)) {
	for _, folder := range []string{"base", "chart"} {
		t.Run(folder, func(t *testing.T) { test(t, applied(t, folder)) })
	}
}

func (m *manifest) add(t *testing.T, object runtime.Object) {
	t.Helper()
	switch o := object.(type) {
	case *apps.StatefulSet:
		if o.Name == "evenkeel" {
			m.proxy = o
		} else {
			m.engines = append(m.engines, o)
		}
	case *core.ConfigMap:
		m.configs = append(m.configs, o)
	case *core.Service:
		m.services = append(m.services, o)
	case *networking.NetworkPolicy:
		m.policies = append(m.policies, o)
	case *disruption.PodDisruptionBudget:
		m.budgets = append(m.budgets, o)
	case *core.ServiceAccount:
		m.accounts = append(m.accounts, o)
	case *rbac.Role:
		m.roles = append(m.roles, o)
	case *rbac.RoleBinding:
		m.bindings = append(m.bindings, o)
	default:
		t.Fatalf("%T: say in this test what must be true of it", o)
	}
}

func selects(t *testing.T, s *meta.LabelSelector, pod map[string]string) bool {
	t.Helper()
	selector, err := meta.LabelSelectorAsSelector(s)
	require.NoError(t, err)
	return selector.Matches(labels.Set(pod))
}

func TestTheManifestsFitTogether(t *testing.T) { each(t, fitTogether) }

func fitTogether(t *testing.T, m *manifest) {
	pod := m.proxy.Spec.Template
	require.True(t, selects(t, m.proxy.Spec.Selector, pod.Labels))
	require.Len(t, pod.Spec.Containers, 1)
	c := pod.Spec.Containers[0]

	ports := map[string]int32{}
	for _, p := range c.Ports {
		ports[p.Name] = p.ContainerPort
	}
	require.Len(t, m.services, 3)
	for _, s := range m.services {
		require.True(t, labels.SelectorFromSet(s.Spec.Selector).Matches(labels.Set(pod.Labels)), s.Name)
		for _, p := range s.Spec.Ports {
			require.Contains(t, ports, p.TargetPort.StrVal, "%s: a port the pod has", s.Name)
		}
	}
	for _, b := range m.budgets {
		require.True(t, selects(t, b.Spec.Selector, pod.Labels))
		require.Less(t, b.Spec.MaxUnavailable.IntVal, *m.proxy.Spec.Replicas, "one pod stays")
	}
	require.Len(t, m.budgets, 1)
	guarded := false
	for _, p := range m.policies {
		ours := selects(t, &p.Spec.PodSelector, pod.Labels)
		guarded = guarded || ours
		for _, rule := range p.Spec.Ingress {
			for _, p := range rule.Ports {
				if ours {
					require.Contains(t, ports, p.Port.StrVal)
				} else {
					require.Contains(t, m.configs[0].Data["evenkeel.yaml"], "port: "+p.Port.StrVal+",", "the port of engines that discovery looks for")
				}
			}
		}
	}
	require.True(t, guarded, "a network policy is about the pod")

	require.Equal(t, m.accounts[0].Name, pod.Spec.ServiceAccountName)
	require.Equal(t, m.roles[0].Name, m.bindings[0].RoleRef.Name)
	require.Equal(t, m.accounts[0].Name, m.bindings[0].Subjects[0].Name)
	for _, rule := range m.roles[0].Rules {
		require.NotContains(t, rule.Verbs, "*")
		require.NotContains(t, rule.Resources, "*")
		require.NotContains(t, rule.Resources, "secrets")
	}

	for _, probe := range []*core.Probe{c.StartupProbe, c.LivenessProbe, c.ReadinessProbe} {
		require.Equal(t, "admin", probe.HTTPGet.Port.StrVal)
		require.Contains(t, []string{"/livez", "/readyz"}, probe.HTTPGet.Path, "what the admin listener answers without a token")
	}
	require.Equal(t, "/readyz", c.ReadinessProbe.HTTPGet.Path)
}

// TestThePodHasNoMoreThanItNeeds is the restricted standard for pods.
func TestThePodHasNoMoreThanItNeeds(t *testing.T) {
	for _, folder := range []string{"base", "reference", "chart"} {
		m := applied(t, folder)
		pods := map[string]core.PodSpec{"evenkeel": m.proxy.Spec.Template.Spec}
		for _, e := range m.engines {
			pods[e.Name] = e.Spec.Template.Spec
		}
		for name, pod := range pods {
			require.True(t, *pod.SecurityContext.RunAsNonRoot, name)
			require.Equal(t, core.SeccompProfileTypeRuntimeDefault, pod.SecurityContext.SeccompProfile.Type, name)
			require.False(t, pod.HostNetwork || pod.HostPID || pod.HostIPC, name)
			for _, c := range pod.Containers {
				require.False(t, *c.SecurityContext.AllowPrivilegeEscalation, name)
				require.True(t, *c.SecurityContext.ReadOnlyRootFilesystem, name)
				require.Equal(t, []core.Capability{"ALL"}, c.SecurityContext.Capabilities.Drop, name)
			}
		}
	}
}

// TestTheConfigInTheManifestsIsOne reads the pods' config as serve does, its
// secrets beside it.
func TestTheConfigInTheManifestsIsOne(t *testing.T) { each(t, configIsOne) }

func configIsOne(t *testing.T, m *manifest) {
	pod := m.proxy.Spec.Template.Spec
	require.Len(t, m.configs, 1)
	text := m.configs[0].Data["evenkeel.yaml"]
	require.NotEmpty(t, text)
	require.Equal(t, m.configs[0].Name, pod.Volumes[0].ConfigMap.Name,
		"in the base by the name with its hash, so that a change rolls the pods")
	mounts := map[string]string{}
	for _, v := range pod.Containers[0].VolumeMounts {
		mounts[v.Name] = v.MountPath
	}
	require.Equal(t, []string{"serve", "--config", mounts["config"] + "/evenkeel.yaml"}, pod.Containers[0].Args)

	secrets := t.TempDir()
	for name, secret := range map[string]string{"admin-token": "0123456789abcdef0123456789abcdef",
		"peers.key": "one 0123456789abcdef0123456789abcdef"} {
		require.NoError(t, os.WriteFile(filepath.Join(secrets, name), []byte(secret), 0o600))
		require.Contains(t, text, mounts["secrets"]+"/"+name)
	}
	file := filepath.Join(t.TempDir(), "evenkeel.yaml")
	require.NoError(t, os.WriteFile(file, bytes.ReplaceAll([]byte(text), []byte(mounts["secrets"]), []byte(secrets)), 0o600))
	cfg, err := config.Load(file)
	require.NoError(t, err)
	require.NoError(t, cfg.Validate())

	// Ownership hangs on the API server unless membership is closed.
	var names []string
	for i := range *m.proxy.Spec.Replicas {
		names = append(names, fmt.Sprint(m.proxy.Name, "-", i))
	}
	require.Equal(t, names, cfg.HA.MemberList(), "all pods, by the names that a StatefulSet gives them")
	require.Greater(t, time.Duration(m.proxy.Spec.MinReadySeconds)*time.Second, cfg.HA.Lease+cfg.HA.Times().StartDelay,
		"the pod before may admit when the next one is replaced")
	peers := slices.IndexFunc(m.services, func(s *core.Service) bool { return s.Name == m.proxy.Spec.ServiceName })
	require.GreaterOrEqual(t, peers, 0, "the service that the pods' names belong to")
	require.True(t, m.services[peers].Spec.PublishNotReadyAddresses, "pods find each other before they are ready")

	for name, listen := range map[string]string{"http": cfg.Listen, "admin": cfg.Admin.Listen, "peers": cfg.Geo.Listen} {
		for _, p := range pod.Containers[0].Ports {
			if p.Name == name {
				require.True(t, strings.HasSuffix(listen, fmt.Sprint(":", p.ContainerPort)), "%s listens on %s", name, listen)
			}
		}
	}
	drain := cfg.Limits.DrainGrace + cfg.Limits.DrainTimeout + gateway.CutTime
	require.Greater(t, time.Duration(*pod.TerminationGracePeriodSeconds)*time.Second, drain, "nothing kills a pod that drains")
	require.LessOrEqual(t,
		time.Duration(pod.Containers[0].ReadinessProbe.PeriodSeconds*pod.Containers[0].ReadinessProbe.FailureThreshold)*time.Second,
		cfg.Limits.DrainGrace,
		"who asks has noticed before requests are refused")

	memory := pod.Containers[0].Resources.Limits.Memory().Value()
	goal := resource.MustParse(strings.TrimSuffix(pod.Containers[0].Env[0].Value, "B"))
	require.Equal(t, "GOMEMLIMIT", pod.Containers[0].Env[0].Name)
	require.Less(t, goal.Value(), memory)
	const started = 30 << 20 // of a proxy that does nothing, docs/operate.md
	bounds := started + int64(cfg.Limits.Bodies) + int64(cfg.Limits.ResumeBytes) + 2*cfg.Prefill.Index.MaxBytes + cfg.Admin.ReceiptsBytes
	require.LessOrEqual(t, bounds, goal.Value(), "all that the config lets a pod keep fits, so that no prompts can have the kernel kill it")

	unit, err := os.ReadFile("../../../configs/systemd/evenkeel.service")
	require.NoError(t, err)
	require.Contains(t, string(unit), fmt.Sprint("TimeoutStopSec=", *pod.TerminationGracePeriodSeconds))
	require.NotContains(t, string(unit), "ProcSubset=pid",
		"Go reads /proc/sys/net/core/somaxconn, and without it only 128 connections may wait to be accepted")
}

// TestWhatStandsBesideTheBaseFitsIt compares the base with the examples beside it, which not every
// cluster can have.
func TestWhatStandsBesideTheBaseFitsIt(t *testing.T) {
	base, reference := applied(t, "base"), applied(t, "reference")
	pod := base.proxy.Spec.Template
	read := func(name string) (documents [][]byte) {
		text, err := os.ReadFile(filepath.Join(manifests, name))
		require.NoError(t, err)
		return split("\n" + string(text))
	}

	scaled := map[string]bool{}
	for _, d := range read("hpa.yaml") {
		h, ok := object(t, d).(*autoscaling.HorizontalPodAutoscaler)
		require.True(t, ok, "it is applied in the engines' namespace as it is")
		require.Empty(t, h.Namespace)
		of := h.Spec.ScaleTargetRef
		scaled[of.Name] = slices.ContainsFunc(reference.engines, func(e *apps.StatefulSet) bool {
			return of == autoscaling.CrossVersionObjectReference{APIVersion: "apps/v1", Kind: "StatefulSet", Name: e.Name}
		})
	}
	require.Equal(t, map[string]bool{"prefill": true, "decode": true}, scaled)

	flow, ok := object(t, read("flowschema.yaml")[0]).(*flowcontrol.FlowSchema)
	require.True(t, ok)
	require.Equal(t, "leader-election", flow.Spec.PriorityLevelConfiguration.Name, "the level of Kubernetes' own leases")
	const serviceAccounts = 9000 // the precedence of the schema that has all of them as workload-low (k8s.io/apiserver, flowcontrol/bootstrap)
	require.Less(t, flow.Spec.MatchingPrecedence, int32(serviceAccounts), "the first schema that matches counts")
	rule := flow.Spec.Rules[0]
	require.Equal(t, base.accounts[0].Name, rule.Subjects[0].ServiceAccount.Name)
	require.True(t, slices.ContainsFunc(base.roles[0].Rules, func(r rbac.PolicyRule) bool {
		may := rule.ResourceRules[0]
		return slices.Equal(r.APIGroups, may.APIGroups) && slices.Equal(r.Resources, may.Resources) && slices.Equal(r.Verbs, may.Verbs)
	}), "all that the role allows with leases")

	var monitor struct {
		Spec struct {
			Selector            meta.LabelSelector
			JobLabel            string `json:"jobLabel"`
			PodMetricsEndpoints []struct {
				Port, Path    string
				Authorization struct {
					Type        string
					Credentials core.SecretKeySelector
				}
			} `json:"podMetricsEndpoints"`
		}
	}
	text, err := yaml.YAMLToJSON(read("podmonitor.yaml")[0])
	require.NoError(t, err)
	require.NoError(t, gojson.Unmarshal(text, &monitor))
	require.True(t, selects(t, &monitor.Spec.Selector, pod.Labels))
	require.Equal(t, "evenkeel", pod.Labels[monitor.Spec.JobLabel], "the job's name in alerts and dashboards")
	at := monitor.Spec.PodMetricsEndpoints[0]
	require.Equal(t, []string{"admin", "/metrics", "Bearer"}, []string{at.Port, at.Path, at.Authorization.Type})
	require.Equal(t, pod.Spec.Volumes[1].Secret.SecretName, at.Authorization.Credentials.Name)
	require.Contains(t, base.configs[0].Data["evenkeel.yaml"], "/"+at.Authorization.Credentials.Key+"\n", "the admin token")
	require.NotContains(t, pod.Annotations, "prometheus.io/scrape", "no token can be written there")
}
